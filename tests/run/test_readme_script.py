"""The script of the README trains on two ranks as it stands, and leaves a checkpoint."""

from __future__ import annotations

import contextlib
import io
import os
import re
import runpy
from pathlib import Path

import pytest
import torch.distributed as dist

from bench.launch.code import checkout_root
from bench.testing.workers import ForkServer

README = checkout_root() / "README.md"


def train(folder: Path, port: int) -> str:
    """In a rank: what the script prints where torchrun would have started it."""
    where = {"RANK": dist.get_rank(), "WORLD_SIZE": dist.get_world_size(), "MASTER_PORT": port}
    dist.destroy_process_group()  # the script makes its own
    os.environ |= {name: str(value) for name, value in where.items()}
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    os.chdir(folder)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        runpy.run_path("train.py", run_name="__main__")
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
