"""A call on resident ranks and how it ended: what all of them returned, or what went wrong."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from bench.testing.workers import Workers, WorkersError
from bench.validate.rank import Refused
from bench.validate.traces import exception_of, frames_of, last_words


@dataclass(frozen=True)
class CallOutcome:
    """kind: `ended`, `refused` (on all ranks), `raised` (an exception), `died` or `hung`.

    answers: of all ranks, in order, of one that ended. For the other kinds, of the rank that says
    most: rank, text in a line, and where it was, in lines. seconds: of the call.
    """

    kind: Literal["ended", "refused", "raised", "died", "hung"]
    answers: tuple[Any, ...] = ()
    rank: int | None = None
    text: str = ""
    where: tuple[str, ...] = ()
    seconds: float = 0.0


#: More of a rank's processor time for a case (0.2 to 0.5 s; 6.5 s for the first of DeepSpeed, which
#: compiles) is a failure, whatever the numbers are: something spins, or is done again and again.
MOST_CPU_SECONDS = 20.0
#: Of the resident ranks: meshes of several axes leave process groups behind.
CALLS_OF_A_GROUP = 16
#: torch's caches hold meshes of groups that are gone, where ranks were in a world of another size
#: between; such ranks have ended with this, and new ones are asked.
_STALE = "Could not resolve the process group"


def outcome_on(
    workers: Workers,
    function: Callable[..., Any],
    *arguments: Any,
    ranks: int,
    seconds: float,
    cpu_seconds: float | None = None,
) -> CallOutcome:
    """Call `function` on the first ranks; at most `seconds`, and `cpu_seconds` of computing."""
    start = time.perf_counter()
    most = MOST_CPU_SECONDS if cpu_seconds is None else cpu_seconds
    limits: dict[str, Any] = {"seconds": seconds, "ranks": ranks, "cpu_seconds": most}
    for _ in range(2):
        try:
            outcome = _outcome(workers.run(function, *arguments, **limits))
        except WorkersError as error:
            outcome = of_failures(error)
        if _STALE not in outcome.text:
            break
    return replace(outcome, seconds=time.perf_counter() - start)


def _outcome(answers: Sequence[Any]) -> CallOutcome:
    refused = {r: a.reason for r, a in enumerate(answers) if isinstance(a, Refused)}
    if len(refused) == len(answers):
        return CallOutcome("refused", rank=0, text=refused[0])
    if refused:
        first = min(refused)
        text = f"refused on ranks {sorted(refused)} alone: {refused[first]}"
        return CallOutcome("raised", rank=first, text=text)
    return CallOutcome("ended", tuple(answers))


def of_failures(error: WorkersError) -> CallOutcome:
    """The rank that failed first by its kind: a death is nobody else's doing, an exception may be.

    A rank that raises lives on and answers, so nobody dies of it.
    """
    for kind in ("died", "raised"):
        failed = [failure for failure in error.failures if failure.kind == kind]
        if failed:
            first = min(failed, key=lambda failure: (_is_of_a_peer(failure.text), failure.rank))
            words = last_words(first.log)
            where = (*words, *(frame for frame in frames_of(first.text) if frame not in words))
            return CallOutcome(kind, (), first.rank, exception_of(first.text), where)
    refused = [
        f"rank {rank} refused: {answer.reason}"
        for rank, answer in error.returned.items()
        if isinstance(answer, Refused)
    ]
    silent = error.failures
    waiting = [
        f"rank {failure.rank} {frame}" for failure in silent for frame in frames_of(failure.text)
    ]
    text = "; ".join([silent[0].text.split(", was in")[0], *refused])
    where = (*last_words(silent[0].log), *waiting)
    return CallOutcome("hung", (), silent[0].rank, text, where)


def _is_of_a_peer(text: str) -> bool:
    """Whether a rank failed because another one had: it came first by number, not in time."""
    last = text.strip().splitlines()[-1] if text.strip() else ""
    return any(word in last for word in ("Connection closed", "Connection reset", "gloo"))
