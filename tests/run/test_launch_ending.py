"""Which of several failing ranks is the cause, decided without a process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from small_runs import RUN

from bench.launch.ending import Ending, Evidence, classify, gather_evidence
from bench.launch.first_to_break import RankFailure
from bench.launch.local.process_tree import out_of_memory_kills
from bench.launch.process import signal_name
from bench.launch.protocol import JobState
from bench.store import ResultsStore, RunFolder

ENDED = JobState("ended", exit_code=1)


def report(kind: str = "crashed", message: str = "mine", **seconds: float) -> dict[str, Any]:
    return {"kind": kind, "message": message, **seconds}


LOST = report(message="RuntimeError: Connection closed by peer")
LOST_AT_10 = LOST | {"time_seconds": 10.0}
AGENT = "the process that starts the ranks "


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
) -> Ending:
    """failures, exit_codes, died: by rank. agent: its exit code."""
    reports, codes, deaths = failures or {}, exit_codes or {}, died or {}
    return classify(
        Evidence(
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


def case(state: str, rank: int | None, says: str, code: int | None = None, **evidence: Any):
    """What is told of `evidence`; code: the exit code, if it is told."""
    return state, rank, says, code, evidence


def crashed(rank: int | None, says: str, code: int | None = None, **evidence: Any):
    return case("crashed", rank, says, code, **evidence)


ENDINGS = {
    "all steps": case("ok", None, "", 0, agent=0),
    "success with missing steps is not believed": crashed(
        1, "after 12 of 20 steps", agent=0, steps=(20, 12)
    ),
    # What no peer can cause is the cause.
    **{
        f"{kind} beside a lost connection": case(
            kind, 1, "rank 1: mine", failures={0: LOST, 1: report(kind)}, exit_codes={0: 1, 1: 1}
        )
        for kind in ("out_of_memory", "nan", "unsupported")
    },
    "out of memory beside an aborted peer": case(
        "out_of_memory", 1, "", failures={1: report("out_of_memory")}, exit_codes={0: -6, 1: 1}
    ),
    "a signal beside a lost connection": crashed(
        1, "SIGSEGV", -11, failures={0: LOST}, exit_codes={0: 1, 1: -11}
    ),
    **{
        f"an exception beside a peer ended by {number}": crashed(
            0, "rank 0: mine", failures={0: report()}, exit_codes={0: 1, 1: -number}
        )
        for number in (6, 15)
    },
    # The loss may be reported before the death is noticed, by a few milliseconds.
    **{
        f"a loss just before a death by {number}": crashed(
            1,
            "",
            -number,
            failures={0: LOST_AT_10},
            exit_codes={0: 1, 1: -number},
            died={0: 10.02, 1: 10.01},
        )
        for number in (2, 6, 9, 11, 15)
    },
    # A survivor that torchrun ended is never the cause.
    **{
        f"an exit before a survivor was ended by {number}": crashed(
            1, "", 7, exit_codes={0: -number, 1: 7}, died={0: 10.3, 1: 10.0}
        )
        for number in (9, 15)
    },
    "a loss before a survivor was ended": crashed(
        1,
        f"rank 1: {LOST['message']}",
        failures={1: LOST_AT_10},
        exit_codes={0: -9, 1: 1},
        died={0: 10.3, 1: 10.1},
    ),
    "two signals, the second rank first": crashed(
        1, "", exit_codes={0: -15, 1: -15}, died={0: 10.2, 1: 10.0}
    ),
    "two crashes, the second rank first": crashed(
        1, "", exit_codes={0: -11, 1: -6}, died={0: 10.2, 1: 10.0}
    ),
    "a watchdog that aborts after an exception of its peer": crashed(
        1,
        "rank 1: mine",
        failures={1: report(time_seconds=10.0)},
        exit_codes={0: -6, 1: 1},
        died={0: 10.1, 1: 10.2},
    ),
    "an agent that was ended": crashed(
        None, AGENT + "was ended by SIGTERM", failures={0: LOST}, agent=143, agent_signal=15
    ),
    "a lone abort": crashed(1, "rank 1 was ended by SIGABRT", exit_codes={1: -6}),
    "an exit without a report": crashed(
        1, "exit code 3", 3, failures={0: LOST}, exit_codes={0: 1, 1: 3}
    ),
    "SIGKILL": crashed(1, "from outside the harness", exit_codes={1: -9}),
    "SIGKILL while the kernel killed for memory": case(
        "out_of_memory", 1, "acted 2 times", exit_codes={1: -9}, kills=2
    ),
    "another signal meanwhile": crashed(1, "SIGSEGV", exit_codes={1: -11}, kills=2),
    "no word and an agent that was killed": crashed(None, "was ended by SIGKILL", -9, agent=-9),
    "no word and an agent that left": crashed(None, "logs/agent*.log", 2, agent=2),
    "no word from another host": crashed(
        None, AGENT + "on b was ended by SIGKILL", agent=-9, agent_place="on b"
    ),
    "an unknown kind": crashed(0, "rank 0: mine", failures={0: report("splendid")}),
    "an empty report": crashed(0, "rank 0: no message", failures={0: {}}),
}


@pytest.mark.parametrize("name", ENDINGS)
def test_the_cause_of_an_end_is_told(name: str) -> None:
    state, rank, says, code, evidence = ENDINGS[name]
    found = outcome(**evidence)
    assert (found.state, found.failed_rank) == (state, rank)
    assert says in found.reason
    assert code is None or found.exit_code == code


def test_a_long_message_is_cut() -> None:
    assert len(outcome({0: report(message="x" * 10_000)}).reason) < 1000


@pytest.fixture
def folder(store: ResultsStore) -> RunFolder:
    with store.new_run(RUN, sweep=None, cell=None, repeat=0, arm=None, code="x") as made:
        return made


FIRST_EXITED = {"failures": [{"rank": 0, "exit_code": 1, "died_seconds": 11.0}]}


@pytest.mark.parametrize(
    ("agents", "says"),
    [
        ({0: {"signal": 15, "signal_seconds": 12.0}}, "on n2 is gone without a word"),
        (
            {0: FIRST_EXITED, 1: {"signal": 15, "signal_seconds": 9.9}},
            "on n2 was ended by SIGTERM",
        ),
        (
            {0: FIRST_EXITED, 1: {"signal": 15, "signal_seconds": 11.5}},
            f"rank 0: {LOST['message']}",
        ),
    ],
)
def test_of_several_nodes_the_agent_that_ended_first_is_named(
    folder: RunFolder, agents: dict[int, dict], says: str
) -> None:
    for node, host in enumerate(("n1", "n2")):
        proof = json.dumps({"rank": node, "host": host})
        (folder.logs_path / f"code_proof.node{node}.jsonl").write_text(proof)
    for node, document in agents.items():
        name = f"agent.node{node}.json" if node else "agent.json"
        (folder.logs_path / name).write_text(json.dumps({"failures": []} | document))
    (folder.path / "failure.rank0.json").write_text(json.dumps(LOST_AT_10))
    evidence = gather_evidence(folder, ENDED, steps=[1, 1], steps_expected=9)
    assert says in classify(evidence).reason


def test_of_several_exceptions_the_earliest_is_the_cause(folder: RunFolder) -> None:
    for rank, seconds in {0: 30.5, 1: 30.1}.items():
        document = report(message=f"at {seconds}", time_seconds=seconds)
        (folder.path / f"failure.rank{rank}.json").write_text(json.dumps(document))
    evidence = gather_evidence(folder, ENDED, steps=[0, 0], steps_expected=1)
    assert classify(evidence).reason == "rank 1: at 30.1"


@pytest.mark.parametrize(
    "content", ["", "{", "[]", '{"failures": 3}', '{"failures": [{"rank": "x"}]}']
)
def test_a_damaged_report_of_the_agent_is_ignored(folder: RunFolder, content: str) -> None:
    (folder.logs_path / "agent.json").write_text(content)
    assert gather_evidence(folder, ENDED, steps=[0], steps_expected=1).failures == ()


def test_a_signal_without_a_name_is_given_by_number() -> None:
    assert signal_name(99) == "signal 99"


def test_kernel_kills_are_counted_from_what_can_be_read(tmp_path: Path) -> None:
    machine, group = tmp_path / "vmstat", tmp_path / "memory.events"
    machine.write_text("nr_free_pages 3\noom_kill 4\nother 9\n")
    group.write_text("low 0\noom 7\noom_kill 2\noom_group_kill 0\n")
    assert out_of_memory_kills((machine, group)) == 4
    assert out_of_memory_kills((group, tmp_path / "absent")) == 2
    assert out_of_memory_kills((tmp_path / "absent",)) == 0
