"""Simple mistakes, each as what every contribution to a gradient would then count.

Counts are 1 where a contribution is right: [rank][microbatch], in units of 1 / ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

Counts: TypeAlias = list[list[float]]
_NEAR = 1e-3


@dataclass(frozen=True)
class Situation:
    """rank: whose rows they are; outer: groups of neighbouring ranks, 1 is none."""

    ranks: int
    microbatches: int
    rank: int = 0
    outer: int = 1


def _everywhere(value: Callable[[Situation], float]) -> Callable[[Situation], Counts]:
    return lambda s: [[value(s)] * s.microbatches for _ in range(s.ranks)]


def _where(right: Callable[[Situation, int, int], bool]) -> Callable[[Situation], Counts]:
    return lambda s: [
        [float(right(s, rank, index)) for index in range(s.microbatches)] for rank in range(s.ranks)
    ]


def _neighbours(s: Situation, rank: int) -> bool:
    """Whether `rank` is in the inner group of the rank whose rows they are."""
    inner = s.ranks // s.outer
    return rank // inner == s.rank // inner


#: What it looks like, where to look, and the counts.
_MISTAKES: tuple[tuple[str, Callable[[Situation], Counts]], ...] = (
    (
        "as if not divided by the ranks: the divisor of the reduction",
        _everywhere(lambda s: s.ranks),
    ),
    (
        "as if divided by the ranks twice: an average in the collective and a divisor beside it",
        _everywhere(lambda s: 1 / s.ranks),
    ),
    (
        "as if divided by the microbatches: the scale of the loss",
        _everywhere(lambda s: 1 / s.microbatches),
    ),
    (
        "as if divided by the inner ranks alone: the divisor of the outer stage",
        _everywhere(lambda s: s.outer),
    ),
    ("as if every contribution was added twice", _everywhere(lambda _: 2.0)),
    ("as if nothing was reduced: the buffer is empty", _everywhere(lambda _: 0.0)),
    (
        "as if this rank's own contribution alone had been taken: no reduction over the ranks",
        _where(lambda s, rank, _: rank == s.rank),
    ),
    (
        "as if this rank's own contribution alone had been taken, and not divided",
        lambda s: [[float(s.ranks * (r == s.rank))] * s.microbatches for r in range(s.ranks)],
    ),
    (
        "as if reduced over the inner ranks alone: the outer stage did not run",
        _where(lambda s, rank, _: _neighbours(s, rank)),
    ),
    (
        "as if averaged over the inner ranks alone: the outer stage did not run",
        lambda s: [[float(s.outer * _neighbours(s, r))] * s.microbatches for r in range(s.ranks)],
    ),
    (
        "as if the last microbatch alone was kept: the accumulator was overwritten",
        _where(lambda s, _, index: index == s.microbatches - 1),
    ),
)


def explanations(counts: Counts, rank: int, outer: int) -> list[str]:
    """All simple mistakes that give just these counts; none where nothing is wrong."""
    situation = Situation(len(counts), len(counts[0]), rank, outer)
    if _equal(counts, _everywhere(lambda _: 1.0)(situation)):
        return []
    told = [text for text, mistake in _MISTAKES if _equal(counts, mistake(situation))]
    told += [text for text in (_one_lost(counts), _repeated(counts)) if text]
    return [*told[:1], *(f"or {text}" for text in told[1:])]


def _one_lost(counts: Counts) -> str | None:
    """All of one rank, or all of one microbatch, is not there and everything else is right."""
    ranks, microbatches = range(len(counts)), range(len(counts[0]))
    for lost in ranks:
        if _equal(counts, [[float(r != lost)] * len(microbatches) for r in ranks]):
            return (
                f"as if rank {lost}'s contribution was lost: it sent zeros, or was not waited for"
            )
    for lost in microbatches:
        if _equal(counts, [[float(index != lost) for index in microbatches] for _ in ranks]):
            return f"as if microbatch {lost + 1} was lost"
    return None


def _repeated(counts: Counts) -> str | None:
    """A microbatch that was reduced again with each later one, as partial sums are."""
    wanted = [[float(len(row) - index) for index in range(len(row))] for row in counts]
    if len(counts[0]) > 1 and _equal(counts, wanted):
        return "as if the accumulator was reduced after every microbatch and not cleared"
    return None


def _equal(found: Counts, wanted: Counts) -> bool:
    return all(
        abs(one - other) <= _NEAR * max(1.0, other)
        for row, right in zip(found, wanted, strict=True)
        for one, other in zip(row, right, strict=True)
    )
