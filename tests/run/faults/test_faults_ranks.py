"""A rank dies, hangs or fails: one record, one state, the right rank, nobody left behind."""

from __future__ import annotations

import os
import re
import signal
import socket
import threading
from pathlib import Path

import psutil
import pytest

from bench.launch import Limits
from bench.record import RunStatus

pytestmark = [pytest.mark.processes, pytest.mark.timeout(60)]

ENDLESS = 100_000


def alive(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


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


@pytest.mark.nightly
def test_a_rank_killed_by_sigkill_in_mid_run_is_named(scripted) -> None:
    run = scripted(steps=ENDLESS)

    def kill_rank_1(steps: int) -> None:
        if steps >= 3 and alive(run.pid("rank1")):
            os.kill(run.pid("rank1"), signal.SIGKILL)

    status = run.run(on_step=kill_rank_1)
    assert (status.state, status.failed_rank, status.exit_code) == ("crashed", 1, -9)
    assert "rank 1 was ended by SIGKILL" in status.reason
    assert len(run.record().steps[0]) >= 3


@pytest.mark.parametrize(
    ("number", "guilty"),
    [
        pytest.param(signal.SIGABRT, 1, marks=pytest.mark.nightly),
        pytest.param(signal.SIGTERM, 1, marks=pytest.mark.nightly),
        pytest.param(signal.SIGTERM, 0, marks=pytest.mark.nightly),
        pytest.param(signal.SIGINT, 1, marks=pytest.mark.nightly),
        pytest.param(signal.SIGSEGV, 0, marks=pytest.mark.nightly),
        (signal.SIGKILL, 1),
    ],
)
def test_the_rank_that_a_signal_ended_is_named_and_not_the_one_that_lost_it(
    scripted, number: signal.Signals, guilty: int
) -> None:
    script = {1 - guilty: (2, "notice"), guilty: (3, f"signal {number}")}
    status = scripted(script, steps=ENDLESS).run()
    assert (status.state, status.failed_rank, status.exit_code) == ("crashed", guilty, -number)
    assert f"rank {guilty} was ended by {number.name}" in status.reason


# Daily as rules: test_launch_outcome.py.
@pytest.mark.nightly
def test_a_survivor_that_the_agent_ended_is_not_blamed(scripted) -> None:
    status = scripted({1: (3, "raise")}, steps=ENDLESS).run()
    assert status.state == "crashed"
    assert (status.failed_rank, status.reason) == (1, "rank 1: ValueError: scripted exception")


# Daily with SIGKILL: test_faults_launcher.py.
@pytest.mark.nightly
def test_an_agent_that_is_ended_is_named_and_not_a_rank(scripted) -> None:
    run = scripted({0: (2, "notice"), 1: (2, "notice")}, steps=ENDLESS)

    def end_the_agent(steps: int) -> None:
        if steps >= 3 and alive(run.pid("rank1")):
            psutil.Process(run.pid("rank1")).parent().terminate()

    status = run.run(on_step=end_the_agent)
    assert (status.state, status.failed_rank) == ("crashed", None)
    assert "the process that starts the ranks was ended by SIGTERM" in status.reason


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
def test_a_stopped_agent_is_named_and_no_rank(scripted) -> None:
    run = scripted(steps=5, hang_seconds=1.5)

    def stop_the_agent(steps: int) -> None:
        if steps >= 1 and alive(run.pid("rank1")):
            psutil.Process(run.pid("rank1")).parent().suspend()

    status = run.run(on_step=stop_the_agent)
    assert (status.state, status.failed_rank) == ("hang", None)
    assert "(after step 5); the process that starts the ranks is stopped (SIGSTOP)" in status.reason
    assert "rank 0 gone, last line" in status.reason


@pytest.mark.nightly
def test_a_rank_that_is_behind_the_others_is_a_hang_and_is_named(scripted) -> None:
    status = scripted({0: (4, "hang")}, steps=ENDLESS, hang_seconds=1.5).run()
    assert (status.state, status.failed_rank) == ("hang", 0)
    assert "rank 0: 3, rank 1: 4" in status.reason
    # What tells a starved machine from a stuck rank.
    assert re.search(r"rank 0 sleeping, last line \d+ s ago, rank 1 \w+, last", status.reason)
    assert re.search(r"load \d+\.\d on \d+ cores", status.reason)


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


@pytest.mark.nightly
def test_ranks_that_ignore_sigterm_are_ended_all_the_same(scripted) -> None:
    run = scripted({0: (2, "ignore SIGTERM"), 1: (2, "ignore SIGTERM")}, steps=ENDLESS)
    assert run_until_step_3(run).state == "interrupted"


def test_what_a_rank_has_started_in_a_session_of_its_own_is_ended_too(scripted) -> None:
    run = scripted({1: (2, "start a child")}, steps=ENDLESS)
    assert run_until_step_3(run).state == "interrupted"
    assert (run.folder.path / "pid.child").exists()


@pytest.mark.nightly
def test_a_child_that_lost_its_parent_is_found_and_ended(scripted) -> None:
    run = scripted({1: (2, "start a child")}, steps=ENDLESS)

    def kill_the_parent(steps: int) -> None:
        if steps >= 3 and alive(run.pid("rank1")):
            os.kill(run.pid("rank1"), signal.SIGKILL)

    assert run.run(on_step=kill_the_parent).state == "crashed"
    assert (run.folder.path / "pid.child").exists()


# Daily as rules: test_launch_outcome.py; with a run that ends in a report of its own: `nan` in
# tests/cli/test_cli_real_runs.py.
@pytest.mark.nightly
@pytest.mark.parametrize(
    ("script", "state", "rank", "says"),
    [
        ({0: (3, "exit 7")}, "crashed", 0, "rank 0 ended with exit code 7"),
        ({1: (3, "stop early"), 0: (3, "stop early")}, "crashed", 0, "after 2 of 20 steps"),
        ({1: (3, "out_of_memory")}, "out_of_memory", 1, "rank 1: scripted out_of_memory"),
    ],
)
def test_a_failure_of_a_rank_is_a_state_with_a_reason(scripted, script, state, rank, says) -> None:
    status = scripted(script).run()
    assert status.state == state
    assert says in status.reason
    assert status.failed_rank == rank
