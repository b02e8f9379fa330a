"""A case on resident ranks: give it, and get what every rank saw or how it went wrong."""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass
from typing import Literal

from bench.testing.workers import WorkerFailure, Workers, WorkersError
from bench.validate import rank
from bench.validate.cases import Case
from bench.validate.observation import Seen
from bench.validate.traces import exception_of, frames_of


@dataclass(frozen=True)
class CaseOutcome:
    """kind: `seen`, `unsupported`, `raised` (an exception), `died` or `hung`.

    seen: of all ranks, in order. For the other kinds, of the rank that says most: rank, text in a
    line, log, and frames: where the engine was (if ranks hang, of all that do). seconds: of the
    call.
    """

    kind: Literal["seen", "unsupported", "raised", "died", "hung"]
    seen: tuple[Seen, ...] = ()
    rank: int | None = None
    text: str = ""
    frames: tuple[str, ...] = ()
    log: tuple[str, ...] = ()
    seconds: float = 0.0


#: Of processor time that a rank uses for a case (0.2 to 0.5), and for a program.
USUAL_CPU_SECONDS = 0.5
#: More is a failure, whatever the numbers are: something spins, or is done again and again.
MOST_CPU_SECONDS = 10 * USUAL_CPU_SECONDS


def run_on(workers: Workers, case: Case, device: str, seconds: float) -> CaseOutcome:
    """Run `case` on the first `case.ranks` ranks; at most `seconds`, and `MOST_CPU_SECONDS`."""
    start = time.perf_counter()
    outcome = _outcome(workers, case, device, seconds)
    return dataclasses.replace(outcome, seconds=time.perf_counter() - start)


def _outcome(workers: Workers, case: Case, device: str, seconds: float) -> CaseOutcome:
    try:
        answers = workers.run(
            rank.run,
            case,
            device,
            seconds=seconds,
            ranks=case.ranks,
            cpu_seconds=MOST_CPU_SECONDS,
        )
    except WorkersError as error:
        return of_failures(error)
    refused = {r: a.reason for r, a in enumerate(answers) if isinstance(a, rank.Refused)}
    if len(refused) == len(answers):
        return CaseOutcome("unsupported", rank=0, text=refused[0])
    if refused:
        first = min(refused)
        text = f"refused on ranks {sorted(refused)} alone: {refused[first]}"
        return CaseOutcome("raised", rank=first, text=text)
    return CaseOutcome("seen", tuple(answers))


def of_failures(error: WorkersError) -> CaseOutcome:
    """The rank that failed first by its kind: a death is nobody else's doing, an exception may be.

    A rank that raises lives on and answers, so nobody dies of it.
    """
    by_kind: dict[str, list[WorkerFailure]] = {}
    for failure in error.failures:
        by_kind.setdefault(failure.kind, []).append(failure)
    for kind in ("died", "raised"):
        if kind in by_kind:
            first = min(by_kind[kind], key=lambda f: (_is_of_a_peer(f.text), f.rank))
            said = exception_of(first.text)
            return CaseOutcome(kind, (), first.rank, said, frames_of(first.text), first.log)
    silent = by_kind["hung"]
    refused = [
        f"rank {r} refused: {answer.reason}"
        for r, answer in error.returned.items()
        if isinstance(answer, rank.Refused)
    ]
    where = [f"rank {one.rank} {frame}" for one in silent for frame in frames_of(one.text)]
    text = "; ".join([silent[0].text.split(", was in")[0], *refused])
    return CaseOutcome("hung", (), silent[0].rank, text, tuple(where), silent[0].log)


def _is_of_a_peer(text: str) -> bool:
    """Whether a rank failed because another one had: it came first by number, not in time."""
    last = text.strip().splitlines()[-1] if text.strip() else ""
    return any(word in last for word in ("Connection closed", "Connection reset", "gloo"))
