"""The launcher with the real worker: models, engines and gloo, from a spec to a record."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from pathlib import Path

import psutil
import pytest

from bench.launch import Limits, code_identity, launch
from bench.launch.local.process_tree import rank_of
from bench.record import RunRecord, RunStatus
from bench.resolve import Machine, resolve
from bench.spec import EngineSpec, LaunchSpec, RunSpec, TrainSpec
from bench.store import ResultsStore

pytestmark = [pytest.mark.processes, pytest.mark.timeout(120)]

MACHINE = Machine(cpu_count=2, memory_bytes=16 * 2**30)
LIMITS = Limits(tick_seconds=0.1)


def run_of(engine: str, **train: object):
    return resolve(
        RunSpec(
            engine=EngineSpec(name=engine),
            train=TrainSpec(**train),
            launch=LaunchSpec(ranks=1 if engine == "single" else 2),
        ),
        MACHINE,
    )


def launched(root: Path, resolved, on_step=None) -> tuple[RunStatus, RunRecord]:
    store = ResultsStore.open(root / "results", create=True)
    folder = store.new_run(
        resolved, sweep="s", cell="c", repeat=0, arm=None, code=code_identity(resolved)
    )
    status = launch(resolved, folder, stop=threading.Event(), on_step=on_step, limits=LIMITS)
    return status, store.read(folder.run_id)


@pytest.mark.parametrize("engine", [pytest.param("single", marks=pytest.mark.nightly), "mfsdp"])
def test_a_real_run_leaves_a_whole_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: str
) -> None:
    monkeypatch.setenv("PYTHONPROFILEIMPORTTIME", "1")
    resolved = run_of(engine, steps=12, lr=3e-3)
    status, record = launched(tmp_path, resolved)
    assert status.state in {"ok", "unstable"}, status.reason
    assert record.problems == ()
    assert len(record.losses) == 12
    assert record.losses[-1] < record.losses[0]
    assert record.memory is not None
    assert record.environment["runtime"]["engine"] == engine
    assert record.environment["packages"]["torch"]
    # What every rank needs of torch was loaded once, before they were forked.
    loaded = [
        {line.rpartition("|")[2].strip() for line in log.read_text().splitlines()}
        for log in sorted(tmp_path.glob("results/runs/*/*/logs/*.log"))
    ]
    of_torch = {"torch", "torch._dynamo", "torch.distributed.tensor", "torch.distributed.fsdp"}
    found = [modules & (of_torch | {"bench.meters.memory_profile"}) for modules in loaded]
    assert found == [of_torch, *[{"bench.meters.memory_profile"}] * resolved.launch.ranks]


@pytest.mark.nightly
def test_a_real_rank_killed_in_mid_run_is_the_one_that_is_named(tmp_path: Path) -> None:
    killed: list[int] = []
    others = set(psutil.Process().children(recursive=True))

    def kill_rank_1(steps: int) -> None:
        for process in set(psutil.Process().children(recursive=True)) - others:
            with contextlib.suppress(psutil.Error, OSError):  # ended in the meantime
                if not killed and rank_of(process) == 1:
                    killed.append(process.pid)
                    os.kill(process.pid, signal.SIGKILL)

    status, record = launched(tmp_path, run_of("ddp", steps=5000), kill_rank_1)
    assert killed
    assert (status.state, status.failed_rank, status.exit_code) == ("crashed", 1, -9)
    assert "rank 1 was ended by SIGKILL" in status.reason
    assert 0 < len(record.losses) < 5000
    assert set(psutil.Process().children(recursive=True)) <= others


@pytest.mark.nightly
def test_a_real_run_that_diverges_is_nan_with_its_step(tmp_path: Path) -> None:
    resolved = run_of("single", steps=50, lr=1e30, optimizer="sgd", clip_norm=None)
    status, _ = launched(tmp_path, resolved)
    assert status.state == "nan"
    assert "step " in status.reason
