"""One rank as a process: what it leaves behind when it succeeds, fails, or is ended."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
from small_runs import small_run
from torch.nn.attention import SDPBackend, sdpa_kernel

from bench.errors import UnsupportedError, UsageError
from bench.launch.process import AGENT_PID_VARIABLE
from bench.launch.rank import failure_kind
from bench.loop import NonFiniteLossError
from bench.store.reading import read_spec
from bench.worker.rank_process import RankProcess
from bench.worker.reports import attention_kernel, nccl_version
from mfsdp_core.errors import CapabilityNotBuiltError, ConfigurationError

ROOT = Path(__file__).resolve().parents[2]
COMMAND = [sys.executable, "-m", "bench.launch.rank", "bench.worker"]


def spec(folder: Path, *, engine="single", ranks=1, switches=None, **train) -> Path:
    """A run folder of a small run."""
    run = small_run(
        {"name": engine, **(switches or {})},
        train={"steps": 4, "global_batch": 4, "micro_batch": 2, "seq_len": 16} | train,
        launch={"ranks": ranks},
    )
    (folder / "logs").mkdir(parents=True)
    (folder / "spec.json").write_text(run.model_dump_json())
    return folder


def environment(**changes: str) -> dict[str, str]:
    own = {"PYTHONPATH": str(ROOT), "MASTER_ADDR": "127.0.0.1", "RANK": "0"}
    return os.environ | own | {AGENT_PID_VARIABLE: str(os.getpid())} | changes


def run_worker(folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, str(folder)],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


def failure(folder: Path) -> dict:
    return json.loads((folder / "failure.rank0.json").read_text())


def waiting_rank(folder: Path, free_port: int) -> subprocess.Popen[str]:
    """Rank 0 of 2 whose other rank never comes: it blocks while the process group is built."""
    run = spec(folder, engine="ddp", ranks=2)
    variables = environment(WORLD_SIZE="2", MASTER_PORT=str(free_port))
    return subprocess.Popen([*COMMAND, str(run)], cwd=ROOT, env=variables, text=True)


def wait_until_listening(process: psutil.Process, port: int) -> None:
    """Until the rank serves the rendezvous, from where on it waits for the other one."""
    deadline = time.monotonic() + 200
    while time.monotonic() < deadline:
        ports = {c.laddr.port for c in process.net_connections("tcp") if c.status == "LISTEN"}
        if port in ports:
            return
        time.sleep(0.1)
    pytest.fail("the rank did not start in 200 s")


def test_a_damaged_spec_is_a_failure_with_a_traceback(tmp_path):
    (tmp_path / "spec.json").write_text("{}")
    (tmp_path / "logs").mkdir()
    done = run_worker(tmp_path)
    assert done.returncode == 1
    assert failure(tmp_path)["kind"] == "crashed"
    assert "spec.json cannot be understood" in failure(tmp_path)["message"]
    assert "Traceback" in failure(tmp_path)["traceback"]
    assert "spec.json cannot be understood" in (tmp_path / "logs" / "rank0.log").read_text()


def test_another_number_of_ranks_than_asked_for_is_refused(tmp_path, monkeypatch):
    run = spec(tmp_path / "run", engine="ddp", ranks=2)
    monkeypatch.setenv("WORLD_SIZE", "1")
    with pytest.raises(UsageError, match=r"asks for 2 ranks, found WORLD_SIZE=1"):
        RankProcess.from_environment(read_spec(run))


@pytest.mark.processes
def test_sigterm_ends_a_rank_that_is_blocked_in_a_collective(tmp_path, free_port):
    rank = waiting_rank(tmp_path / "run", free_port)
    try:
        wait_until_listening(psutil.Process(rank.pid), free_port)
        rank.send_signal(signal.SIGTERM)
        assert rank.wait(timeout=200) == -signal.SIGTERM
    finally:
        rank.kill()
        rank.wait()


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), "out_of_memory"),
        (MemoryError(), "out_of_memory"),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `c`"), "out_of_memory"),
        (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), "out_of_memory"),
        (RuntimeError("Last error:\nFailed to CUDA calloc async 608 bytes"), "out_of_memory"),
        (NonFiniteLossError("step 3: the loss is nan"), "nan"),
        (UnsupportedError("rule", "reason"), "unsupported"),
        (NotImplementedError("not built yet"), "unsupported"),
        (CapabilityNotBuiltError("cuda_graph_mode"), "unsupported"),
        (ConfigurationError("nccl_ub on a CPU"), "crashed"),
        (RuntimeError("Connection closed by peer"), "crashed"),
        (ValueError("the words out of memory alone do not make one"), "crashed"),
    ],
)
def test_a_failure_is_classified_by_its_exception(error, kind):
    assert failure_kind(error) == kind


def test_running_out_of_host_memory_is_out_of_memory():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**50, dtype=torch.uint8)
    assert failure_kind(caught.value) == "out_of_memory"


def test_what_a_user_exits_with_is_in_the_log_of_the_rank(tmp_path):
    run = spec(tmp_path / "run")
    (tmp_path / "leaving.py").write_text("import sys; sys.exit('needs X')")
    variables = environment(PYTHONPATH=f"{ROOT}:{tmp_path}")
    command = [sys.executable, "-m", "bench.launch.rank", "leaving", str(run)]
    assert subprocess.run(command, cwd=ROOT, env=variables, check=False).returncode == 1
    assert "needs X" in (run / "logs" / "rank0.log").read_text()


def test_the_loaded_nccl_stands_beside_the_compiled_one(monkeypatch) -> None:
    class WithNccl:
        @staticmethod
        def get_build_nccl_version() -> tuple[int, int, int]:
            return 2, 27, 3

        @staticmethod
        def get_runtime_nccl_version() -> tuple[int, int, int]:
            return 2, 32, 3

    monkeypatch.setattr(torch.distributed, "ProcessGroupNCCL", WithNccl, raising=False)
    assert (nccl_version("runtime"), nccl_version("build")) == ("2.32.3", "2.27.3")


@pytest.mark.parametrize("has", ["no NCCL", "an older torch"])
def test_a_torch_that_cannot_name_its_nccl_gives_none(monkeypatch, has) -> None:
    if has == "no NCCL":
        monkeypatch.delattr(torch.distributed, "ProcessGroupNCCL", raising=False)
    else:
        monkeypatch.setattr(torch.distributed, "ProcessGroupNCCL", object, raising=False)
    assert (nccl_version("runtime"), nccl_version("build")) == (None, None)


def test_a_captured_step_is_dead_when_its_group_is_destroyed(tmp_path):
    """`destroy_process_group` waits for graphs, which hold NCCL's communicators."""
    switches = {"cuda_graph": True, "allocator": "fixed_pool", "double_buffer": True}
    folder = spec(tmp_path / "run", engine="mfsdp", switches=switches, steps=6)
    command = [sys.executable, str(Path(__file__).with_name("captured_rank.py")), str(folder)]
    variables = environment(WORLD_SIZE="1", LOCAL_RANK="0", MASTER_PORT="0")
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["0 of 1 captured steps live"]


def test_the_kernel_of_attention_is_torchs_own_choice():
    run = small_run("mfsdp")
    with sdpa_kernel(SDPBackend.MATH):
        assert attention_kernel(run, torch.device("cpu")) == "math"
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        assert attention_kernel(run, torch.device("cpu")) == "flash_attention"
