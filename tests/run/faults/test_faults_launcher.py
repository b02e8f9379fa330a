"""The launcher itself is stopped, killed, or runs out of disk."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from bench.launch import Limits, launch
from bench.resolve.resolution import resolve_anywhere
from bench.spec import LaunchSpec, RunSpec, TrainSpec
from bench.store import ResultsStore, StoreFullError
from bench.store.errors import StoreGoneError

pytestmark = [pytest.mark.processes, pytest.mark.timeout(60)]

ROOT = Path(__file__).resolve().parents[3]
WORKERS = Path(__file__).parent / "workers"
ENDLESS = 100_000
LIMITS = Limits(tick_seconds=0.1, grace_seconds=1.0)
_SEEN: list[psutil.Process] = []

LAUNCHER = """
import sys, threading
from bench.launch import launch
from bench.spec import ResolvedRun
from bench.store import ResultsStore
run = ResolvedRun.model_validate_json(sys.argv[2])
store = ResultsStore.open(sys.argv[1], create=True)
with store.lock():
    folder = store.new_run(run, sweep="s", cell="c", repeat=0, arm=None, code="x")
    print(folder.path, flush=True)
    status = launch(run, folder, stop=threading.Event(), worker_module="scripted_worker",
                    on_step=lambda n: print("step", n, flush=True))
    print(status.state, flush=True)
"""


@pytest.fixture(autouse=True)
def no_process_is_left_by_a_failing_test() -> Iterator[list[psutil.Process]]:
    """Whatever a test has seen below its launcher is ended with the test, also when it fails."""
    _SEEN.clear()
    yield _SEEN
    for process in _SEEN:
        if _runs(process):
            process.kill()


def start_launcher(store: ResultsStore, script: dict | None = None) -> psutil.Popen:
    env = {"MFSDP_TEST_SCRIPT": json.dumps(script or {})}
    run = resolve_anywhere(
        RunSpec(train=TrainSpec(steps=ENDLESS), launch=LaunchSpec(ranks=2, env=env))
    )
    launcher = psutil.Popen(
        [sys.executable, "-c", LAUNCHER, str(store.root), run.model_dump_json()],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(WORKERS)])},
        stdout=subprocess.PIPE,
        text=True,
    )
    _SEEN.append(launcher)
    return launcher


def tree_after_first_step(launcher: psutil.Popen) -> list[psutil.Process]:
    """Agent and ranks of a launcher that has printed its first step."""
    for line in launcher.stdout:
        if line.startswith("step"):
            break
    tree = psutil.Process(launcher.pid).children(recursive=True)
    _SEEN.extend(tree)
    assert len(tree) >= 3
    return tree


def gone_within(processes: list[psutil.Process], seconds: float) -> bool:
    """All ended; a zombie has ended, whoever reaps it."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if not any(_runs(process) for process in processes):
            return True
        time.sleep(0.05)
    return False


def _runs(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_a_launcher_killed_by_sigkill_takes_every_rank_with_it(store: ResultsStore) -> None:
    launcher = start_launcher(store)
    tree = tree_after_first_step(launcher)
    os.kill(tree[-1].pid, signal.SIGSTOP)
    launcher.kill()
    launcher.wait()
    assert gone_within(tree, 3.0)
    (record,) = store.records()
    assert record.status.state == "interrupted"
    assert len(record.steps[0]) >= 1
    with store.lock():
        pass
    launcher.stdout.close()


def test_a_stop_request_before_the_ranks_are_up_leaves_nothing_behind(scripted) -> None:
    stop = threading.Event()
    stop.set()
    status = scripted(steps=ENDLESS).run(stop=stop)
    assert (status.state, status.failed_rank) == ("interrupted", None)
    assert "before the first step" in status.reason


def test_a_run_whose_folder_is_removed_is_ended_at_once_and_says_so(scripted) -> None:
    run = scripted(steps=ENDLESS)
    seen: list[int] = []

    def remove(steps: int) -> None:
        if not seen:
            seen.extend(run.pid(f"rank{rank}") for rank in (0, 1))
            run.folder.path.rename(run.folder.path.with_name("elsewhere"))

    with pytest.raises(StoreGoneError, match="its folder is gone"):
        run.run(on_step=remove)
    assert gone_within([psutil.Process(pid) for pid in seen if psutil.pid_exists(pid)], 3.0)


def test_a_worker_that_cannot_be_imported_is_a_crash_that_names_it(store: ResultsStore) -> None:
    resolved = resolve_anywhere(RunSpec())
    folder = store.new_run(resolved, sweep=None, cell=None, repeat=0, arm=None, code="x")
    status = launch(
        resolved, folder, stop=threading.Event(), worker_module="no_such_worker", limits=LIMITS
    )
    assert status.state == "crashed"
    assert "no_such_worker" in status.reason


@pytest.mark.nightly
def test_a_disk_that_fills_up_during_a_run_ends_it_and_keeps_the_finished_ones(
    scripted, store: ResultsStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    finished = scripted(steps=20)
    assert finished.run().state == "ok"
    unlucky = scripted(steps=ENDLESS)
    real = os.fsync

    def full(descriptor: int) -> None:
        real(descriptor)
        raise OSError(28, "No space left on device")

    def fill_the_disk(steps: int) -> None:
        monkeypatch.setattr(os, "fsync", full)
        stop.set()

    stop = threading.Event()
    with pytest.raises(StoreFullError, match="Finished runs are complete"):
        unlucky.run(stop=stop, on_step=fill_the_disk)
    assert unlucky.survivors() == []
    states = {record.run_id: record.status.state for record in store.records()}
    assert states == {finished.folder.run_id: "ok", unlucky.folder.run_id: "interrupted"}


@pytest.mark.nightly
def test_a_real_full_disk_under_the_ranks_loses_no_finished_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    if os.system(f"mount -t tmpfs -o size=160k tmpfs {disk} 2>/dev/null") != 0:
        pytest.skip("mounting a tmpfs needs root; the same is tested with an injected error")
    monkeypatch.setenv("PYTHONPATH", str(WORKERS))
    try:
        store = ResultsStore.open(disk / "results", create=True)
        states = []
        for steps in (20, ENDLESS):
            resolved = resolve_anywhere(RunSpec(train=TrainSpec(steps=steps)))
            folder = store.new_run(resolved, sweep=None, cell=None, repeat=0, arm=None, code="x")
            try:
                status = launch(
                    resolved,
                    folder,
                    stop=threading.Event(),
                    worker_module="scripted_worker",
                    limits=LIMITS,
                )
                states.append(status.state)
            except StoreFullError:
                states.append("full")
        assert states in (["ok", "full"], ["ok", "crashed"])
        first, second = store.records()
        assert (first.status.state, first.problems) == ("ok", ())
        assert second.status.state in {"interrupted", "crashed"}
    finally:
        os.system(f"umount {disk}")
