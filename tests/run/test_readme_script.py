"""Scripts for readers train on two ranks as they stand."""

from __future__ import annotations

import contextlib
import io
import os
import re
import runpy
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from bench.launch.code import checkout_root
from bench.testing.workers import ForkServer

README = checkout_root() / "README.md"


def train(folder: Path, port: int, script: str = "train.py", *arguments: str) -> str:
    """In a rank: what the script prints where torchrun would have started it."""
    where = {"RANK": dist.get_rank(), "WORLD_SIZE": dist.get_world_size(), "MASTER_PORT": port}
    dist.destroy_process_group()  # the script makes its own
    os.environ |= {name: str(value) for name, value in where.items()}
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    os.chdir(folder)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        sys.argv = [script, *arguments]
        runpy.run_path(script, run_name="__main__")
    return printed.getvalue()


@pytest.mark.processes
def test_the_script_of_the_readme_trains_on_two_ranks(
    tmp_path: Path, fork_server: ForkServer, free_port: int
) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    (tmp_path / "train.py").write_text(code)
    with fork_server.workers(2) as ranks:
        printed, _ = ranks.run(train, tmp_path, free_port, seconds=60.0)
    losses = [float(text) for text in re.findall(r"rank 0 step \d+ loss ([\d.]+)", printed)]
    assert len(losses) == 20
    assert losses[-1] < losses[0]
    assert any((tmp_path / "checkpoint").iterdir())


@pytest.mark.processes
def test_a_script_of_torchtitans_shape_trains_alike_under_both_imports(
    tmp_path: Path, fork_server: ForkServer, free_port: int
) -> None:
    """The same losses and norms; between steps no more memory than a gradient's shards above."""
    script = str(checkout_root() / "examples/llama_fsdp2.py")
    lines: dict[str, list[list[float]]] = {}
    for api in ("torch", "ours"):
        with fork_server.workers(2) as ranks:
            printed, _ = ranks.run(train, tmp_path, free_port, script, api, seconds=100.0)
        lines[api] = [
            [float(number) for number in re.findall(r"\d+\.\d+|\d{3,}", line)]
            for line in printed.splitlines()
        ]
    (*wanted, (others,)), (*found, (bytes_held,)) = lines["torch"], lines["ours"]
    assert len(found) == 6
    assert found == [pytest.approx(numbers, rel=1e-5) for numbers in wanted]
    elements = 2 * 256 * 64 + 64 + 4 * (13 * 64 * 64 + 2 * 64)
    assert bytes_held <= others + elements / 2 * 4 * 1.01


@pytest.mark.nightly
@pytest.mark.processes
@pytest.mark.needs("accelerate", "transformers")
def test_what_accelerate_prepares_with_fsdp2_trains_alike_under_the_core(
    tmp_path: Path, fork_server: ForkServer, free_port: int
) -> None:
    script = str(checkout_root() / "examples/accelerate_fsdp2.py")
    numbers: dict[str, list[float]] = {}
    for api, library in ("torch", "torch.distributed.fsdp"), ("ours", "mfsdp_core.fsdp2"):
        with fork_server.workers(2) as ranks:
            printed, _ = ranks.run(train, tmp_path, free_port, script, api, seconds=200.0)
        assert f"run by {library}\n" in printed
        lines = re.findall(r"step \d loss ([\d.]+) norm ([\d.]+)", printed)
        numbers[api] = [float(number) for line in lines for number in line]
    assert len(numbers["torch"]) == 8
    assert numbers["ours"] == pytest.approx(numbers["torch"], rel=1e-5)
