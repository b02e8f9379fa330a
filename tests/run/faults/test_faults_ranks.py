"""A rank dies, hangs or fails: one record, one state, the right rank, nobody left behind."""

from __future__ import annotations

import os
import signal
import socket
import threading
from pathlib import Path

import pytest

from bench.launch import Limits
from bench.record import RunStatus

pytestmark = [pytest.mark.processes, pytest.mark.timeout(60)]

ENDLESS = 100_000


def run_until_step_3(run) -> RunStatus:
    """Stop the run on request once all ranks have finished three steps."""
    stop = threading.Event()
    return run.run(stop=stop, on_step=lambda steps: stop.set() if steps >= 3 else None)


def test_a_run_that_ends_well_is_ok_and_writes_into_its_folder_alone(
    scripted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setenv("TMPDIR", str(scratch))
    run = scripted(steps=20)
    steps: list[int] = []
    status = run.run(on_step=steps.append)
    assert (status.state, status.exit_code, status.failed_rank) == ("ok", 0, None)
    assert steps == sorted(set(steps))
    assert steps[-1] == 20
    record = run.record()
    assert record.problems == ()
    assert [len(samples) for samples in record.steps.values()] == [20, 20]
    assert record.placement is not None
    assert record.placement.ranks_by_node == {socket.gethostname(): [0, 1]}
    assert record.placement.local_ranks == (0, 1)
    assert "rank 0 says hello" in run.log("rank0.log")
    assert "rank 1 says hello" in run.log("rank1.log")
    assert (run.folder.path / "summary.json").exists()
    assert list(scratch.iterdir()) == []
    assert sorted(path.name for path in run.folder.logs_path.iterdir()) == [
        "agent.json",
        "agent.log",
        "code_proof.node0.jsonl",
        "expected_code.json",
        "rank0.log",
        "rank1.log",
    ]


@pytest.mark.nightly
def test_a_run_that_never_gets_steady_is_unstable(scripted) -> None:
    status = scripted(steps=3).run()
    assert status.state == "unstable"
    assert status.reason


def test_the_rank_that_a_signal_ended_is_named_and_not_the_one_that_lost_it(scripted) -> None:
    status = scripted({0: (2, "notice"), 1: (3, "signal 9")}, steps=ENDLESS).run()
    assert (status.state, status.failed_rank, status.exit_code) == ("crashed", 1, -9)
    assert "rank 1 was ended by SIGKILL" in status.reason


def test_a_rank_that_is_stopped_is_a_hang_and_is_named_with_stacks_of_the_others(scripted) -> None:
    run = scripted(steps=ENDLESS, hang_seconds=1.5)
    stopped: list[int] = []

    def stop_rank_1(steps: int) -> None:
        if steps >= 3 and not stopped:
            os.kill(run.pid("rank1"), signal.SIGSTOP)
            stopped.append(steps)

    status = run.run(on_step=stop_rank_1)
    assert (status.state, status.failed_rank) == ("hang", 1)
    assert "rank 1 is stopped (SIGSTOP)" in status.reason
    assert 'File "' in run.log("rank0.log")
    assert "scripted_worker" in run.log("rank0.log")


@pytest.mark.nightly
def test_a_rank_that_never_starts_stepping_has_its_own_allowance(scripted) -> None:
    run = scripted({0: (1, "hang"), 1: (1, "hang")}, hang_seconds=0.5)
    limits = Limits(tick_seconds=0.1, startup_allowance_seconds=4.0, grace_seconds=1.0)
    status = run.run(limits=limits)
    assert (status.state, status.failed_rank) == ("hang", None)
    assert "no rank finished a step for 4.5 s (before the first step)" in status.reason


def test_a_run_that_takes_too_long_is_a_timeout(scripted) -> None:
    run = scripted(steps=ENDLESS, timeout_seconds=1.0)
    status = run.run()
    assert status.state == "timeout"
    assert "launch.timeout_seconds = 1" in status.reason


def test_what_a_rank_has_started_in_a_session_of_its_own_is_ended_too(scripted) -> None:
    run = scripted({1: (2, "start a child")}, steps=ENDLESS)
    assert run_until_step_3(run).state == "interrupted"
    assert (run.folder.path / "pid.child").exists()
