"""From what is left of a run to the one state that its record gets.

Several ranks fail together: the one that broke, and those that lost it. Named is the cause: what a
rank reported about itself and no peer can cause (out of memory, NaN, unsupported), else the rank
that broke first ([Note: who broke first]), else the agent.
"""

from __future__ import annotations

import contextlib
import json
import math
import signal
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from bench.launch.agent import OUTCOME_GLOB
from bench.launch.first_to_break import RankFailure, first_to_break
from bench.launch.process import signal_name
from bench.launch.protocol import JobState
from bench.launch.rank_entry.mfsdp_bench_rank import PROOFS_GLOB
from bench.record import RunState
from bench.store import RunFolder
from bench.store.reading import read_json_object

_OWN_FAULTS: tuple[RunState, ...] = ("out_of_memory", "nan", "unsupported")
_FROM_OUTSIDE = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT})
_MAX_REASON_CHARACTERS = 600


@dataclass(frozen=True)
class Outcome:
    """The end of a run: state, a sentence, the rank that broke, its exit code (-N: signal N)."""

    state: RunState
    reason: str = ""
    failed_rank: int | None = None
    exit_code: int | None = None


@dataclass(frozen=True)
class EndEvidence:
    """What is known after all processes are gone.

    failures: of the ranks that reported one, or that torchrun saw fail; the earliest report first.
    agent_signal: the signal that the agent got, None if it was not. agent_place: `on HOST`,
    if not on this one. agent_gone: it left no report, but those of other nodes did.
    """

    agent_exit_code: int | None
    failures: tuple[RankFailure, ...]
    steps: list[int]
    steps_expected: int
    kernel_oom_kills: int = 0
    agent_signal: int | None = None
    agent_place: str = ""
    agent_gone: bool = False


def gather_evidence(
    folder: RunFolder, end: JobState, *, steps: list[int], steps_expected: int
) -> EndEvidence:
    """Read the reports of the ranks and of the agents out of the run folder."""
    reports = folder.read_failures()
    by_node = {
        int("".join(filter(str.isdigit, file.name)) or 0): read_json_object(file, []) or {}
        for file in folder.logs_path.glob(OUTCOME_GLOB)
    }
    agents = list(by_node.values())
    codes = {rank: int(code) for rank, code in _of_ranks(agents, "exit_code").items()}
    died = _of_ranks(agents, "died_seconds")
    signals = [found for one in agents if isinstance(found := one.get("signal"), int)]
    failures = [
        RankFailure(rank, reports.get(rank), codes.get(rank), died.get(rank))
        for rank in sorted({*reports, *codes})
    ]
    first = min((one.first_seconds for one in failures), default=math.inf)
    ended = _ended_agent(by_node, _hosts(folder), first)
    return EndEvidence(
        agent_exit_code=end.exit_code,
        agent_place=end.detail if ended is None else ended[1],
        agent_gone=ended is not None and ended[0] is None,
        failures=tuple(sorted(failures, key=lambda one: one.reported_seconds)),
        # Where a rank has failed on one node, the agents of the others are ended for it.
        agent_signal=ended[0] if ended else signals[0] if signals and not codes else None,
        steps=steps,
        steps_expected=steps_expected,
        kernel_oom_kills=end.kernel_oom_kills,
    )


def _hosts(folder: RunFolder) -> dict[int, str]:
    """Node -> what it is called, of a run on several, by what its ranks have proven."""
    found: dict[int, str] = {}
    for file in folder.path.glob(PROOFS_GLOB):
        with contextlib.suppress(OSError, ValueError, KeyError, IndexError):
            first = json.loads(file.read_text(encoding="utf-8").splitlines()[0])
            found[int(file.name.split(".")[1].removeprefix("node"))] = str(first["host"])
    return found if len(found) > 1 else {}


def _ended_agent(
    agents: Mapping[int, Mapping[str, Any]], hosts: Mapping[int, str], first_failure: float
) -> tuple[int | None, str] | None:
    """(signal, place) of the one agent whose end the others followed; None if none is known.

    Either it is the only one without a report (no signal then), or it ended before any rank failed.
    """
    silent = [node for node in hosts if node not in agents]
    if len(silent) == 1 and agents:
        return None, f"on {hosts[silent[0]]}"
    ended = {
        float(one["signal_seconds"]): (int(one["signal"]), node)
        for node, one in agents.items()
        if isinstance(one.get("signal_seconds"), int | float)
    }
    if not ended or min(ended) >= first_failure or not hosts:
        return None
    number, node = ended[min(ended)]
    return number, f"on {hosts[node]}" if node in hosts else ""


def classify(evidence: EndEvidence) -> Outcome:
    """The outcome of a run whose agent ended by itself."""
    if evidence.agent_exit_code == 0:
        return _success(evidence)
    return _own_fault(evidence) or _broken(evidence) or _agent_fault(evidence)


def _success(evidence: EndEvidence) -> Outcome:
    for rank, steps in enumerate(evidence.steps):
        if steps != evidence.steps_expected:
            return Outcome(
                "crashed",
                f"rank {rank} ended without an error after {steps} of"
                f" {evidence.steps_expected} steps",
                rank,
                0,
            )
    return Outcome("ok", exit_code=0)


def _own_fault(evidence: EndEvidence) -> Outcome | None:
    for kind in _OWN_FAULTS:
        for one in evidence.failures:
            if one.report is not None and one.report.get("kind") == kind:
                return _reported(one, one.report)
    return None


def _broken(evidence: EndEvidence) -> Outcome | None:
    """The rank that broke first; None if the agent was ended, and took its ranks with it."""
    first = first_to_break(evidence.failures)
    code = evidence.agent_exit_code
    was_ended = evidence.agent_signal is not None or evidence.agent_gone
    agent_ended = was_ended or (code is not None and code < 0)
    if first is None or (agent_ended and first.lost_a_peer):
        return None
    if first.report is not None:
        return _reported(first, first.report)
    if first.signal is not None:
        return _death(evidence, first.rank, first.signal)
    reason = f"rank {first.rank} ended with exit code {first.exit_code} and said no more"
    return Outcome("crashed", f"{reason}; see its log", first.rank, first.exit_code)


def _reported(one: RankFailure, report: Mapping[str, Any]) -> Outcome:
    kind = report.get("kind")
    state: RunState = next((known for known in _OWN_FAULTS if known == kind), "crashed")
    message = str(report.get("message") or "no message").strip()
    reason = f"rank {one.rank}: {message}"[:_MAX_REASON_CHARACTERS]
    return Outcome(state, reason, one.rank, one.exit_code)


def _death(evidence: EndEvidence, rank: int, number: int) -> Outcome:
    reason = f"rank {rank} was ended by {signal_name(number)}"
    state: RunState = "crashed"
    if number == signal.SIGKILL and evidence.kernel_oom_kills > 0:
        state = "out_of_memory"
        reason += (
            f": the kernel's out-of-memory killer acted {evidence.kernel_oom_kills} times on this"
            " machine during the run"
        )
    elif number == signal.SIGKILL:
        reason += (
            ", from outside the harness (the kernel's out-of-memory killer does that; it has left"
            " no count here)"
        )
    elif number == signal.SIGABRT:
        reason += f": it ended itself (a failed assertion, a watchdog); see logs/rank{rank}.log"
    elif number in _FROM_OUTSIDE:
        reason += ", from outside the harness"
    return Outcome(state, reason, rank, -number)


def _agent_fault(evidence: EndEvidence) -> Outcome:
    code = evidence.agent_exit_code
    if evidence.agent_gone:
        how = "is gone without a word (SIGKILL leaves none)"
    elif evidence.agent_signal is not None:
        how = f"was ended by {signal_name(evidence.agent_signal)}"
    elif code is None:
        how = "is gone and left no exit code"
    elif code < 0:
        how = f"was ended by {signal_name(-code)}"
    else:
        how = f"ended with exit code {code}"
    where = f" {evidence.agent_place}" if evidence.agent_place else ""
    reason = f"the process that starts the ranks{where} {how}; see logs/agent*.log"
    return Outcome("crashed", reason, None, code)


def _of_ranks(agents: Iterable[Mapping[str, Any]], name: str) -> dict[int, float]:
    """One number per failed rank out of `agent.json`, where it is known."""
    numbers: dict[int, float] = {}
    for agent in agents:
        with contextlib.suppress(AttributeError, KeyError, TypeError, ValueError):
            found = {int(entry["rank"]): entry.get(name) for entry in agent["failures"]}
            numbers |= {rank: float(value) for rank, value in found.items() if value is not None}
    return numbers
