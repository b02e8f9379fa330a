"""From what is left of a run to the one state that its record gets.

Several ranks fail together: the one that broke, and those that lost it in a collective. Named is
the cause, in this order: what a rank reported about itself and no peer can cause (out of memory,
NaN, unsupported); death by a signal; an exit without a report; the earliest reported exception.
"""

from __future__ import annotations

import math
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.launch.agent import OUTCOME_FILE
from bench.launch.protocol import JobState
from bench.record import RunState
from bench.store import RunFolder
from bench.store.reading import read_json_object

_OWN_FAULTS: tuple[RunState, ...] = ("out_of_memory", "nan", "unsupported")
# Sent by torchrun to the survivors, or raised by a communication watchdog: a consequence.
_SOFT_SIGNALS = frozenset({signal.SIGTERM, signal.SIGABRT, signal.SIGINT, signal.SIGHUP})
_MAX_REASON_CHARACTERS = 600


@dataclass(frozen=True)
class Outcome:
    """The end of a run: state, a sentence, the rank that broke, its exit code (-N: signal N)."""

    state: RunState
    reason: str = ""
    failed_rank: int | None = None
    exit_code: int | None = None


@dataclass(frozen=True)
class Evidence:
    """What is known after all processes are gone.

    failures: reports of the ranks by rank. exit_codes: of the ranks that torchrun saw fail.
    """

    agent_exit_code: int | None
    failures: dict[int, dict[str, Any]]
    exit_codes: dict[int, int]
    steps: list[int]
    steps_expected: int
    kernel_oom_kills: int = 0


def gather_evidence(
    folder: RunFolder, end: JobState, *, steps: list[int], steps_expected: int
) -> Evidence:
    """Read the reports of the ranks (earliest first) and of the agent out of the run folder."""
    failures = folder.read_failures()
    ordered = sorted(failures, key=lambda rank: _failed_at(failures[rank]))
    return Evidence(
        agent_exit_code=end.exit_code,
        failures={rank: failures[rank] for rank in ordered},
        exit_codes=_exit_codes(folder.logs_path / OUTCOME_FILE),
        steps=steps,
        steps_expected=steps_expected,
        kernel_oom_kills=end.kernel_oom_kills,
    )


def classify(evidence: Evidence) -> Outcome:
    """The outcome of a run whose agent ended by itself."""
    if evidence.agent_exit_code == 0:
        return _success(evidence)
    return (
        _own_fault(evidence)
        or _signalled(evidence, soft=False)
        or _silent_exit(evidence)
        or _exception(evidence)
        or _signalled(evidence, soft=True)
        or _agent_fault(evidence)
    )


def _success(evidence: Evidence) -> Outcome:
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


def _own_fault(evidence: Evidence) -> Outcome | None:
    for kind in _OWN_FAULTS:
        for rank, report in evidence.failures.items():
            if report.get("kind") == kind:
                return _reported(evidence, rank, report)
    return None


def _exception(evidence: Evidence) -> Outcome | None:
    for rank, report in evidence.failures.items():
        return _reported(evidence, rank, report)
    return None


def _reported(evidence: Evidence, rank: int, report: dict[str, Any]) -> Outcome:
    kind = report.get("kind")
    state: RunState = next((known for known in _OWN_FAULTS if known == kind), "crashed")
    message = str(report.get("message") or "no message").strip()
    reason = f"rank {rank}: {message}"[:_MAX_REASON_CHARACTERS]
    return Outcome(state, reason, rank, evidence.exit_codes.get(rank))


def _signalled(evidence: Evidence, *, soft: bool) -> Outcome | None:
    for rank, code in sorted(evidence.exit_codes.items()):
        if code < 0 and (-code in _SOFT_SIGNALS) == soft:
            return _death(evidence, rank, -code)
    return None


def _death(evidence: Evidence, rank: int, number: int) -> Outcome:
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
    return Outcome(state, reason, rank, -number)


def _silent_exit(evidence: Evidence) -> Outcome | None:
    for rank, code in sorted(evidence.exit_codes.items()):
        if code > 0 and rank not in evidence.failures:
            reason = f"rank {rank} ended with exit code {code} and said no more; see its log"
            return Outcome("crashed", reason, rank, code)
    return None


def _agent_fault(evidence: Evidence) -> Outcome:
    code = evidence.agent_exit_code
    if code is None:
        how = "is gone and left no exit code"
    elif code < 0:
        how = f"was ended by {signal_name(-code)}"
    else:
        how = f"ended with exit code {code}"
    return Outcome(
        "crashed", f"the process that starts the ranks {how}; see logs/agent.log", None, code
    )


def signal_name(number: int) -> str:
    """`SIGKILL` for 9; `signal 77` for one without a name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _exit_codes(path: Path) -> dict[int, int]:
    document = read_json_object(path, []) or {}
    try:
        return {int(entry["rank"]): int(entry["exit_code"]) for entry in document["failures"]}
    except (KeyError, TypeError, ValueError):
        return {}


def _failed_at(report: dict[str, Any]) -> float:
    seconds = report.get("time_seconds")
    return float(seconds) if isinstance(seconds, int | float) else math.inf
