"""A case on resident ranks: give it, and get what every rank saw or how it went wrong."""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass
from typing import Literal

from bench.testing.workers import Failure, Workers, WorkersError
from bench.validate import rank
from bench.validate.cases import Case
from bench.validate.observation import Seen


@dataclass(frozen=True)
class CaseOutcome:
    """kind: `seen`, `unsupported`, `raised` (an exception), `died` or `hung`.

    seen: of all ranks, in order. rank, text, log: of the rank that says most, for the other kinds.
    seconds: that the call took.
    """

    kind: Literal["seen", "unsupported", "raised", "died", "hung"]
    seen: tuple[Seen, ...] = ()
    rank: int | None = None
    text: str = ""
    log: tuple[str, ...] = ()
    seconds: float = 0.0


def run_on(workers: Workers, case: Case, device: str, seconds: float) -> CaseOutcome:
    """Run `case` on the first `case.ranks` ranks; at most `seconds`."""
    start = time.perf_counter()
    outcome = _outcome(workers, case, device, seconds)
    return dataclasses.replace(outcome, seconds=time.perf_counter() - start)


def _outcome(workers: Workers, case: Case, device: str, seconds: float) -> CaseOutcome:
    try:
        answers = workers.run(rank.run, case, device, seconds=seconds, ranks=case.ranks)
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
    by_kind: dict[str, list[Failure]] = {}
    for failure in error.failures:
        by_kind.setdefault(failure.kind, []).append(failure)
    for kind in ("died", "raised"):
        if kind in by_kind:
            first = min(by_kind[kind], key=lambda f: (_is_of_a_peer(f.text), f.rank))
            return CaseOutcome(kind, rank=first.rank, text=first.text, log=first.log)
    silent = by_kind["hung"]
    refused = [
        f"rank {r} refused: {answer.reason}"
        for r, answer in error.returned.items()
        if isinstance(answer, rank.Refused)
    ]
    stacks = [f"rank {failure.rank}: {failure.text}" for failure in silent]
    text = "\n".join([*refused, *stacks])
    return CaseOutcome("hung", rank=silent[0].rank, text=text, log=silent[0].log)


def _is_of_a_peer(text: str) -> bool:
    """Whether a rank failed because another one had: it came first by number, not in time."""
    last = text.strip().splitlines()[-1] if text.strip() else ""
    return any(word in last for word in ("Connection closed", "Connection reset", "gloo"))
