"""Ranks, agents and launchers that die, hang or fail: one record, its cause, nobody left behind."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from fault_table import ENDLESS, FAULTS, LIMITS, Fault, inject, left_behind

from bench.errors import StoreFullError
from bench.launch.run import launch
from bench.launch.watch import Limits
from bench.record import RunRecord, RunStatus
from bench.resolve.resolution import resolve_anywhere
from bench.spec import LaunchSpec, RunSpec, TrainSpec
from bench.store import ResultsStore, RunFolder

pytestmark = pytest.mark.processes
WORKERS = Path(__file__).parent / "workers"

#: One of every way in which a run ends otherwise; the others are nightly.
DAILY = {
    "rank 1 dies of SIGKILL, its peer notices",
    "rank 1 is stopped",
    "stop, and a rank has a child in its own session",
    "launcher dies while rank 1 is stopped",
    "launcher gets Ctrl-C twice",
}


@pytest.fixture
def store(store: ResultsStore, monkeypatch: pytest.MonkeyPatch) -> ResultsStore:
    monkeypatch.setenv("PYTHONPATH", str(WORKERS))
    return store


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(fault, id=name, marks=[] if name in DAILY else [pytest.mark.nightly])
        for name, fault in FAULTS.items()
    ],
)
def test_a_fault_is_one_record_that_names_its_cause_and_nothing_is_left(
    store: ResultsStore, fault: Fault
) -> None:
    assert inject(store, fault) == []


def new_run(store: ResultsStore, steps: int, **limits: float) -> RunFolder:
    resolved = resolve_anywhere(
        RunSpec(train=TrainSpec(steps=steps), launch=LaunchSpec(ranks=2, **limits))
    )
    return store.new_run(resolved, sweep="s", cell="c", repeat=0, arm=None, code="x")


def run(
    store: ResultsStore,
    folder: RunFolder,
    *,
    stop: threading.Event | None = None,
    on_step: Callable[[int], None] | None = None,
    worker: str = "scripted_worker",
    limits: Limits = LIMITS,
) -> tuple[RunStatus, RunRecord]:
    """Scripted ranks, which nothing befalls, and of which none is left."""
    status = launch(
        store.read(folder.run_id).resolved,
        folder,
        stop=stop or threading.Event(),
        on_step=on_step,
        worker_module=worker,
        limits=limits,
    )
    assert left_behind(folder.path) == [], "the launcher returned before every process was gone"
    record = store.read(folder.run_id)
    assert record.status == status, "the status returned is not the one on disk"
    return status, record


def test_a_run_that_ends_well_is_ok_and_writes_into_its_folder_alone(
    store: ResultsStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setenv("TMPDIR", str(scratch))
    folder = new_run(store, 20)
    steps: list[int] = []
    status, record = run(store, folder, on_step=steps.append)
    assert (status.state, status.exit_code, status.failed_rank) == ("ok", 0, None)
    assert steps == sorted(set(steps))
    assert steps[-1] == 20
    assert record.problems == ()
    assert [len(samples) for samples in record.steps.values()] == [20, 20]
    assert record.placement is not None
    assert record.placement.ranks_by_node == {socket.gethostname(): [0, 1]}
    assert record.placement.local_ranks == (0, 1)
    for rank in (0, 1):
        assert f"rank {rank} says hello" in (folder.logs_path / f"rank{rank}.log").read_text()
    assert (folder.path / "summary.json").exists()
    assert list(scratch.iterdir()) == []
    assert sorted(path.name for path in folder.logs_path.iterdir()) == [
        "agent.json",
        "agent.log",
        "code_proof.node0.jsonl",
        "expected_code.json",
        "rank0.log",
        "rank1.log",
    ]


def test_a_stop_request_before_the_ranks_are_up_leaves_nothing_behind(store: ResultsStore) -> None:
    stop = threading.Event()
    stop.set()
    status, _ = run(store, new_run(store, ENDLESS), stop=stop)
    assert (status.state, status.failed_rank) == ("interrupted", None)
    assert "before the first step" in status.reason


def test_a_worker_that_cannot_be_imported_is_a_crash_that_names_it(store: ResultsStore) -> None:
    status, _ = run(store, new_run(store, 20), worker="no_such_worker")
    assert status.state == "crashed"
    assert "no_such_worker" in status.reason


@pytest.mark.nightly
def test_a_rank_that_never_starts_stepping_has_its_own_allowance(
    store: ResultsStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MFSDP_TEST_SCRIPT", '{"0": [1, "hang"], "1": [1, "hang"]}')
    limits = Limits(tick_seconds=0.1, startup_allowance_seconds=4.0, grace_seconds=1.0)
    status, _ = run(store, new_run(store, 20, hang_seconds=0.5), limits=limits)
    assert (status.state, status.failed_rank) == ("hang", None)
    assert "no rank finished a step for 4.5 s (before the first step)" in status.reason


@pytest.mark.nightly
def test_a_disk_that_fills_up_during_a_run_ends_it_and_keeps_the_finished_ones(
    store: ResultsStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a disk that is full in truth: tests/run/test_store_writing.py."""
    finished, unlucky = new_run(store, 20), new_run(store, ENDLESS)
    assert run(store, finished)[0].state == "ok"
    real = os.fsync
    stop = threading.Event()

    def full(descriptor: int) -> None:
        real(descriptor)
        raise OSError(28, "No space left on device")

    def fill_the_disk(_: int) -> None:
        monkeypatch.setattr(os, "fsync", full)
        stop.set()

    with pytest.raises(StoreFullError, match="Finished runs are complete"):
        run(store, unlucky, stop=stop, on_step=fill_the_disk)
    assert left_behind(unlucky.path) == []
    states = {record.run_id: record.status.state for record in store.records()}
    assert states == {finished.run_id: "ok", unlucky.run_id: "interrupted"}
