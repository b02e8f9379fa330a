"""How a run ended: from what is left of it to the one ending that its record gets.

Several ranks fail together: the one that broke, and those that lost it. Named is the cause: what a
rank reported about itself and no peer can cause (out of memory, NaN, unsupported), else the rank
that broke first ([Note: who broke first]), else the agent. `RULES` has that order.
"""

from __future__ import annotations

import contextlib
import json
import math
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Final

from pydantic import BaseModel

from bench.launch.agent import OUTCOME_GLOB
from bench.launch.first_to_break import RankFailure, first_to_break
from bench.launch.process import signal_name
from bench.launch.protocol import JobState
from bench.launch.rank_entry.mfsdp_bench_rank import PROOFS_GLOB
from bench.record import RunState, understood
from bench.store import RunFolder
from bench.store.reading import read_json_object

_OWN_FAULTS: Final[tuple[RunState, ...]] = ("out_of_memory", "nan", "unsupported")
_MAX_REASON_CHARACTERS: Final = 600
GONE: Final = 0
_OUTSIDE: Final = ", from outside the harness"
#: What a signal that has ended a rank says about its cause.
_SAID_BY_SIGNAL: Final[dict[int, str]] = {
    signal.SIGKILL: f"{_OUTSIDE} (the kernel's out-of-memory killer does that; it has left no count"
    " here)",
    signal.SIGABRT: ": it ended itself (a failed assertion, a watchdog); see logs/rank{rank}.log",
    **dict.fromkeys((signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT), _OUTSIDE),
}


@dataclass(frozen=True)
class Ending:
    """The end of a run: state, a sentence, the rank that broke, its exit code (-N: signal N)."""

    state: RunState
    reason: str = ""
    failed_rank: int | None = None
    exit_code: int | None = None


@dataclass(frozen=True)
class Evidence:
    """What is known after all processes are gone.

    failures: of the ranks that reported one, or that torchrun saw fail; the earliest report first.
    agent_signal: the signal that the agent got, `GONE` if it left no report where those of other
    nodes did. agent_place: `on HOST`, if not on this one.
    """

    agent_exit_code: int | None
    failures: tuple[RankFailure, ...]
    steps: list[int]
    steps_expected: int
    kernel_oom_kills: int = 0
    agent_signal: int | None = None
    agent_place: str = ""

    @property
    def agent_ended(self) -> str:
        """How the agent was ended, in words; empty if it ended by itself."""
        if self.agent_signal == GONE:
            return "is gone without a word (SIGKILL leaves none)"
        number = self.agent_signal or -(self.agent_exit_code or 0)
        return f"was ended by {signal_name(number)}" if number > 0 else ""


def classify(evidence: Evidence) -> Ending:
    """The ending of a run whose agent ended by itself: that of the first rule which has one."""
    return next(ending for rule in RULES if (ending := rule(evidence)) is not None)


def _success(evidence: Evidence) -> Ending | None:
    if evidence.agent_exit_code != 0:
        return None
    for rank, steps in enumerate(evidence.steps):
        if steps != evidence.steps_expected:
            reason = f"ended without an error after {steps} of {evidence.steps_expected} steps"
            return Ending("crashed", f"rank {rank} {reason}", rank, 0)
    return Ending("ok", exit_code=0)


def _own_fault(evidence: Evidence) -> Ending | None:
    """What no peer can cause."""
    kinds = [(failure.report or {}).get("kind") for failure in evidence.failures]
    state = next((state for state in _OWN_FAULTS if state in kinds), None)
    return None if state is None else _reported(evidence.failures[kinds.index(state)], state)


def _broken_rank(evidence: Evidence) -> Ending | None:
    """The rank that broke first; None if the agent was ended, and took its ranks with it."""
    first = first_to_break(evidence.failures)
    if first is None or (evidence.agent_ended and first.lost_a_peer):
        return None
    if first.report is not None:
        return _reported(first, "crashed")
    if first.signal is not None:
        return _death(evidence, first.rank, first.signal)
    reason = f"rank {first.rank} ended with exit code {first.exit_code} and said no more"
    return Ending("crashed", f"{reason}; see its log", first.rank, first.exit_code)


def _reported(failure: RankFailure, state: RunState) -> Ending:
    message = str((failure.report or {}).get("message") or "no message").strip()
    reason = f"rank {failure.rank}: {message}"[:_MAX_REASON_CHARACTERS]
    return Ending(state, reason, failure.rank, failure.exit_code)


def _death(evidence: Evidence, rank: int, number: int) -> Ending:
    reason, kills = f"rank {rank} was ended by {signal_name(number)}", evidence.kernel_oom_kills
    if number == signal.SIGKILL and kills:
        reason += f": the kernel's out-of-memory killer acted {kills} times on this machine during"
        return Ending("out_of_memory", f"{reason} the run", rank, -number)
    said = _SAID_BY_SIGNAL.get(number, "").format(rank=rank)
    return Ending("crashed", reason + said, rank, -number)


def _agent(evidence: Evidence) -> Ending:
    code = evidence.agent_exit_code
    by_itself = "is gone and left no exit code" if code is None else f"ended with exit code {code}"
    who = f"the process that starts the ranks {evidence.agent_place}".rstrip()
    reason = f"{who} {evidence.agent_ended or by_itself}; see logs/agent*.log"
    return Ending("crashed", reason, None, code)


RULES: Final[tuple[Callable[[Evidence], Ending | None], ...]] = (
    _success,
    _own_fault,
    _broken_rank,
    _agent,
)


class _AgentReport(BaseModel):
    """`agent*.json`, as `bench.launch.agent` writes it."""

    failures: list[RankFailure] = []
    signal: int | None = None
    signal_seconds: float = math.inf


def gather_evidence(
    folder: RunFolder, end: JobState, *, steps: list[int], steps_expected: int
) -> Evidence:
    """Read the reports of the ranks and of the agents out of the run folder."""
    reports = folder.read_failures()
    agents = {}
    for file in folder.logs_path.glob(OUTCOME_GLOB):
        report = understood(_AgentReport, read_json_object(file, [])) or _AgentReport()
        agents[int("".join(filter(str.isdigit, file.name)) or 0)] = report
    seen = {failure.rank: failure for agent in agents.values() for failure in agent.failures}
    failures = [
        replace(seen.get(rank, RankFailure(rank)), report=reports.get(rank))
        for rank in sorted({*reports, *seen})
    ]
    # Where a rank has failed on one node, the agents of the others are ended for it.
    signals = [agent.signal for agent in agents.values() if agent.signal is not None and not seen]
    first = min((failure.first_seconds for failure in failures), default=math.inf)
    ended = _ended_agent(agents, _hosts(folder), first)
    number, place = ended or (next(iter(signals), None), end.detail)
    return Evidence(
        agent_exit_code=end.exit_code,
        agent_signal=number,
        agent_place=place,
        failures=tuple(sorted(failures, key=lambda failure: failure.reported_seconds)),
        steps=steps,
        steps_expected=steps_expected,
        kernel_oom_kills=end.kernel_oom_kills,
    )


def _hosts(folder: RunFolder) -> dict[int, str]:
    """Node -> what it is called, of a run on several, by what its ranks have proven."""
    hosts: dict[int, str] = {}
    for file in folder.path.glob(PROOFS_GLOB):
        with contextlib.suppress(OSError, ValueError, KeyError, IndexError):
            first = json.loads(file.read_text(encoding="utf-8").splitlines()[0])
            hosts[int(file.name.split(".")[1].removeprefix("node"))] = str(first["host"])
    return hosts if len(hosts) > 1 else {}


def _ended_agent(
    agents: Mapping[int, _AgentReport], hosts: Mapping[int, str], first_failure: float
) -> tuple[int | None, str] | None:
    """(signal, place) of the one agent whose end the others followed; None if none is known.

    Either it is the only one without a report, or it ended before any rank failed.
    """
    silent = [node for node in hosts if node not in agents]
    if len(silent) == 1 and agents:
        return GONE, f"on {hosts[silent[0]]}"
    node = min(agents, key=lambda name: agents[name].signal_seconds, default=None)
    if node is None or not hosts or agents[node].signal_seconds >= first_failure:
        return None
    return agents[node].signal, f"on {hosts[node]}" if node in hosts else ""
