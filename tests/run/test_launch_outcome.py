"""Which of several failing ranks is the cause, decided without a process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.launch.first_to_break import RankFailure
from bench.launch.local.kernel_memory import out_of_memory_kills
from bench.launch.outcome import EndEvidence, Outcome, classify, gather_evidence, signal_name
from bench.launch.protocol import JobState
from bench.resolve import Machine, resolve
from bench.spec import RunSpec
from bench.store import ResultsStore

ENDED = JobState("ended", exit_code=1)
RUN = resolve(RunSpec(), Machine(cpu_count=2, memory_bytes=16 * 2**30))


def outcome(
    failures: dict[int, dict] | None = None,
    exit_codes: dict[int, int] | None = None,
    *,
    agent: int = 1,
    steps: tuple[int, int] = (20, 20),
    kills: int = 0,
    died: dict[int, float] | None = None,
    agent_signal: int | None = None,
    agent_place: str = "",
) -> Outcome:
    reports, codes, deaths = failures or {}, exit_codes or {}, died or {}
    return classify(
        EndEvidence(
            agent_exit_code=agent,
            failures=tuple(
                RankFailure(rank, reports.get(rank), codes.get(rank), deaths.get(rank))
                for rank in sorted({*reports, *codes})
            ),
            steps=list(steps),
            steps_expected=20,
            kernel_oom_kills=kills,
            agent_signal=agent_signal,
            agent_place=agent_place,
        )
    )


def report(kind: str, message: str = "m") -> dict:
    return {"kind": kind, "message": message}


LOST_PEER = report("crashed", "RuntimeError: Connection closed by peer")


def test_a_run_with_all_its_steps_is_ok() -> None:
    assert outcome(agent=0) == Outcome("ok", exit_code=0)


def test_success_with_missing_steps_is_not_believed() -> None:
    found = outcome(agent=0, steps=(20, 12))
    assert (found.state, found.failed_rank) == ("crashed", 1)
    assert "after 12 of 20 steps" in found.reason


@pytest.mark.parametrize("kind", ["out_of_memory", "nan", "unsupported"])
def test_what_no_peer_can_cause_is_the_cause(kind: str) -> None:
    found = outcome({0: LOST_PEER, 1: report(kind, "mine")}, {0: 1, 1: 1})
    assert (found.state, found.reason, found.failed_rank) == (kind, "rank 1: mine", 1)


def test_a_rank_out_of_memory_is_the_cause_also_when_its_peer_was_aborted() -> None:
    found = outcome({1: report("out_of_memory")}, {0: -6, 1: 1})
    assert (found.state, found.failed_rank) == ("out_of_memory", 1)


def test_a_rank_ended_by_a_signal_is_the_cause_of_a_lost_connection() -> None:
    found = outcome({0: LOST_PEER}, {0: 1, 1: -11})
    assert (found.state, found.failed_rank, found.exit_code) == ("crashed", 1, -11)
    assert "SIGSEGV" in found.reason


@pytest.mark.parametrize("number", [6, 15])
def test_an_exception_is_the_cause_of_a_peer_that_was_aborted_or_terminated(number: int) -> None:
    found = outcome({0: report("crashed", "mine")}, {0: 1, 1: -number})
    assert (found.reason, found.failed_rank) == ("rank 0: mine", 0)


@pytest.mark.parametrize("number", [2, 6, 9, 11, 15])
def test_a_death_by_any_signal_is_the_cause_of_a_lost_connection(number: int) -> None:
    # The loss may be reported before the death is noticed, by a few milliseconds.
    lost = LOST_PEER | {"time_seconds": 10.0}
    found = outcome({0: lost}, {0: 1, 1: -number}, died={0: 10.02, 1: 10.01})
    assert (found.failed_rank, found.exit_code) == (1, -number)


@pytest.mark.parametrize("number", [9, 15])
def test_a_survivor_that_torchrun_ended_is_never_the_cause(number: int) -> None:
    found = outcome({}, {0: -number, 1: 7}, died={0: 10.3, 1: 10.0})
    assert (found.failed_rank, found.exit_code) == (1, 7)
    lost = LOST_PEER | {"time_seconds": 10.0}
    found = outcome({1: lost}, {0: -number, 1: 1}, died={0: 10.3, 1: 10.1})
    assert (found.failed_rank, found.reason) == (1, f"rank 1: {lost['message']}")


def test_of_two_ranks_ended_by_signals_the_first_is_the_cause() -> None:
    assert outcome({}, {0: -15, 1: -15}, died={0: 10.2, 1: 10.0}).failed_rank == 1
    assert outcome({}, {0: -11, 1: -6}, died={0: 10.2, 1: 10.0}).failed_rank == 1


def test_a_watchdog_that_aborts_after_an_exception_of_its_peer_is_not_the_cause() -> None:
    mine = report("crashed", "mine") | {"time_seconds": 10.0}
    found = outcome({1: mine}, {0: -6, 1: 1}, died={0: 10.1, 1: 10.2})
    assert (found.failed_rank, found.reason) == (1, "rank 1: mine")


def test_an_agent_that_was_ended_is_the_cause_of_lost_connections() -> None:
    found = outcome({0: LOST_PEER}, agent=143, agent_signal=15)
    assert (found.state, found.failed_rank) == ("crashed", None)
    assert "the process that starts the ranks was ended by SIGTERM" in found.reason


@pytest.mark.parametrize(
    ("agents", "says"),
    [
        ({0: {"signal": 15, "signal_seconds": 12.0}}, "on n2 is gone without a word"),
        (
            {
                0: {"failures": [{"rank": 0, "exit_code": 1, "died_seconds": 11.0}]},
                1: {"signal": 15, "signal_seconds": 9.9},
            },
            "on n2 was ended by SIGTERM",
        ),
        (
            {
                0: {"failures": [{"rank": 0, "exit_code": 1, "died_seconds": 11.0}]},
                1: {"signal": 15, "signal_seconds": 11.5},
            },
            "rank 0: RuntimeError: Connection closed by peer",
        ),
    ],
)
def test_of_several_nodes_the_agent_that_ended_first_is_named(
    tmp_path: Path, agents: dict[int, dict], says: str
) -> None:
    store = ResultsStore.open(tmp_path / "results", create=True)
    with store.new_run(RUN, sweep=None, cell=None, repeat=0, arm=None, code="x") as folder:
        for node, host in enumerate(("n1", "n2")):
            proof = json.dumps({"rank": node, "host": host})
            (folder.logs_path / f"code_proof.node{node}.jsonl").write_text(proof)
        for node, document in agents.items():
            name = f"agent.node{node}.json" if node else "agent.json"
            (folder.logs_path / name).write_text(json.dumps({"failures": []} | document))
        lost = LOST_PEER | {"time_seconds": 10.0}
        (folder.path / "failure.rank0.json").write_text(json.dumps(lost))
        evidence = gather_evidence(folder, ENDED, steps=[1, 1], steps_expected=9)
    assert says in classify(evidence).reason


def test_a_lone_abort_is_a_crash_by_that_signal() -> None:
    assert "rank 1 was ended by SIGABRT" in outcome({}, {1: -6}).reason


def test_an_exit_without_a_report_is_the_cause_of_a_lost_connection() -> None:
    found = outcome({0: LOST_PEER}, {0: 1, 1: 3})
    assert (found.failed_rank, found.exit_code) == (1, 3)
    assert "exit code 3" in found.reason


def test_of_several_exceptions_the_earliest_is_the_cause(tmp_path: Path) -> None:
    store = ResultsStore.open(tmp_path / "results", create=True)
    with store.new_run(RUN, sweep=None, cell=None, repeat=0, arm=None, code="x") as folder:
        for rank, seconds in {0: 30.5, 1: 30.1}.items():
            document = report("crashed", f"at {seconds}") | {"time_seconds": seconds}
            (folder.path / f"failure.rank{rank}.json").write_text(json.dumps(document))
        evidence = gather_evidence(folder, ENDED, steps=[0, 0], steps_expected=1)
    assert classify(evidence).reason == "rank 1: at 30.1"


def test_sigkill_from_outside_says_who_might_have_sent_it() -> None:
    found = outcome({}, {1: -9})
    assert found.state == "crashed"
    assert "from outside the harness" in found.reason


def test_sigkill_while_the_kernel_was_killing_for_memory_is_out_of_memory() -> None:
    found = outcome({}, {1: -9}, kills=2)
    assert found.state == "out_of_memory"
    assert "acted 2 times" in found.reason


def test_another_signal_is_not_blamed_on_memory() -> None:
    assert outcome({}, {1: -11}, kills=2).state == "crashed"


@pytest.mark.parametrize(("code", "says"), [(-9, "was ended by SIGKILL"), (2, "exit code 2")])
def test_without_a_word_from_the_ranks_the_agent_is_named(code: int, says: str) -> None:
    found = outcome(agent=code)
    assert (found.state, found.exit_code) == ("crashed", code)
    assert says in found.reason
    assert "logs/agent*.log" in found.reason


def test_the_host_of_an_agent_that_was_ended_is_named() -> None:
    found = outcome(agent=-9, agent_place="on b")
    assert "the process that starts the ranks on b was ended by SIGKILL" in found.reason


def test_a_report_of_an_unknown_kind_is_a_crash() -> None:
    assert outcome({0: report("splendid")}).state == "crashed"
    assert outcome({0: {}}).reason == "rank 0: no message"


def test_a_long_message_is_cut() -> None:
    assert len(outcome({0: report("crashed", "x" * 10_000)}).reason) < 1000


@pytest.mark.parametrize(
    "content", ["", "{", "[]", '{"failures": 3}', '{"failures": [{"rank": "x"}]}']
)
def test_a_damaged_report_of_the_agent_is_ignored(tmp_path: Path, content: str) -> None:
    store = ResultsStore.open(tmp_path / "results", create=True)
    with store.new_run(RUN, sweep=None, cell=None, repeat=0, arm=None, code="x") as folder:
        (folder.logs_path / "agent.json").write_text(content)
        evidence = gather_evidence(folder, ENDED, steps=[0], steps_expected=1)
    assert evidence.failures == ()


def test_a_signal_without_a_name_is_given_by_number() -> None:
    assert signal_name(99) == "signal 99"


def test_kernel_kills_are_counted_from_what_can_be_read(tmp_path: Path) -> None:
    machine, group = tmp_path / "vmstat", tmp_path / "memory.events"
    machine.write_text("nr_free_pages 3\noom_kill 4\nother 9\n")
    group.write_text("low 0\noom 7\noom_kill 2\noom_group_kill 0\n")
    assert out_of_memory_kills((machine, group)) == 4
    assert out_of_memory_kills((group, tmp_path / "absent")) == 2
    assert out_of_memory_kills((tmp_path / "absent",)) == 0
