"""How a case or a program ended on its ranks: what all of them returned, or what went wrong."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.testing.workers import ForkServer, Workers, WorkersError
from bench.validate import rank
from bench.validate.program import Program
from bench.validate.rank import Outcome
from bench.validate.traces import exception_of, frames_of, last_words

#: More of a rank's processor time for a case (0.2 to 0.5 s; 6.5 s for the first of DeepSpeed, which
#: compiles) is a failure, whatever the numbers are: something spins, or is done again and again.
MOST_CPU_SECONDS = 20.0
#: Of the resident ranks: meshes of several axes leave process groups behind.
CALLS_OF_A_GROUP = 16
DEFAULT_CPU_RANKS = 4
_PROGRAM_SECONDS = 10.0
#: Of processor time, ten times what a pass uses; as much of waiting again.
_PASS_SECONDS = 0.5
#: torch's caches hold meshes of groups that are gone, where ranks were in a world of another size
#: between; such ranks have ended with this, and new ones are asked.
_STALE = "Could not resolve the process group"
_DIFFERS = "DiffersError: "


def resident(
    server: ForkServer, ranks: int = DEFAULT_CPU_RANKS, core: Path | None = None
) -> AbstractContextManager[Workers]:
    """Ranks for cases and programs. core: folder with the mfsdp_core that they import."""
    return server.workers(ranks, core, rank.prepare, CALLS_OF_A_GROUP)


def outcome_of(workers: Workers, program: Program) -> Outcome:
    """Run a program on the first ranks of `workers`."""
    further = sum(len(cycle.passes) for cycle in program.cycles) * _PASS_SECONDS
    limits = {"seconds": _PROGRAM_SECONDS + 2 * further, "cpu_seconds": MOST_CPU_SECONDS + further}
    outcome = outcome_on(workers, rank.run, program, ranks=program.ranks, **limits)
    if outcome.kind == "refused":
        workers.end()  # collectives may be under way
    return outcome


def outcome_on(
    workers: Workers,
    function: Callable[..., Any],
    *arguments: Any,
    ranks: int,
    seconds: float,
    cpu_seconds: float | None = None,
) -> Outcome:
    """Call `function` on the first ranks; at most `seconds`, and `cpu_seconds` of computing."""
    start = time.perf_counter()
    most = MOST_CPU_SECONDS if cpu_seconds is None else cpu_seconds
    limits: dict[str, Any] = {"seconds": seconds, "ranks": ranks, "cpu_seconds": most}
    for _ in range(2):
        try:
            outcome = _of_answers(workers.run(function, *arguments, **limits))
        except WorkersError as error:
            outcome = of_failures(error)
        if _STALE not in outcome.text:
            break
    return replace(outcome, seconds=time.perf_counter() - start)


def _of_answers(answers: Sequence[Any]) -> Outcome:
    said = {r: answer for r, answer in enumerate(answers) if isinstance(answer, Outcome)}
    if not said:
        return Outcome("ended", tuple(answers))
    refused = [r for r, answer in said.items() if answer.kind == "refused"]
    if 0 < len(refused) < len(answers):
        text = f"refused on ranks {refused} alone: {said[refused[0]].text}"
        return Outcome("raised", rank=refused[0], text=text)
    first = min(said, key=lambda r: said[r].kind == "equal")
    return replace(said[first], rank=None if said[first].kind == "equal" else first)


def of_failures(error: WorkersError) -> Outcome:
    """The rank that failed first by its kind: a death is nobody else's doing, an exception may be.

    A rank that raises lives on and answers, so nobody dies of it.
    """
    for kind in ("died", "raised"):
        failed = [failure for failure in error.failures if failure.kind == kind]
        if failed:
            first = min(failed, key=lambda failure: (_is_of_a_peer(failure.text), failure.rank))
            words = last_words(first.log)
            where = (*words, *(frame for frame in frames_of(first.text) if frame not in words))
            text = exception_of(first.text)
            if _DIFFERS in text:
                return Outcome("differs", (), first.rank, text.partition(_DIFFERS)[2], where)
            return Outcome(kind, (), first.rank, text, where)
    refused = [
        f"rank {rank} refused: {answer.text}"
        for rank, answer in error.returned.items()
        if isinstance(answer, Outcome) and answer.kind == "refused"
    ]
    silent = error.failures
    waiting = [
        f"rank {failure.rank} {frame}" for failure in silent for frame in frames_of(failure.text)
    ]
    text = "; ".join([silent[0].text.split(", was in")[0], *refused])
    where = (*last_words(silent[0].log), *waiting)
    return Outcome("hung", (), silent[0].rank, text, where)


def _is_of_a_peer(text: str) -> bool:
    """Whether a rank failed because another one had: it came first by number, not in time."""
    last = text.strip().splitlines()[-1] if text.strip() else ""
    return any(word in last for word in ("Connection closed", "Connection reset", "gloo"))
