"""A ratio of times, what is known about it, and how it was obtained."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from reports.statistics.deciding import smallest_p
from reports.statistics.interval import Interval, Rearrangements, subset_means, swap_means


@dataclass(frozen=True)
class RatioEstimate:
    """Head over base. Everything in natural logarithms: 0 is no change, log(1.05) is 5 % more.

    base, head: log samples, one per run; with `paired`, the i-th of both are of one block.
    log_ratio: mean difference (the ratio is a geometric mean). interval: at `alpha`, None where so
    few runs can exclude nothing. known: what p-values and interval come from.
    """

    paired: bool
    base: tuple[float, ...]
    head: tuple[float, ...]
    log_ratio: float
    interval: Interval | None
    alpha: float
    known: Rearrangements

    @property
    def n(self) -> int:
        """Blocks, or runs of the smaller side."""
        return min(len(self.base), len(self.head))

    @property
    def ratio(self) -> float:
        """Head over base as a plain factor."""
        return math.exp(self.log_ratio)

    @property
    def smallest_p(self) -> float:
        """The smallest p-value that so many runs could give."""
        least = float(smallest_p(len(self.base), len(self.head), paired=self.paired))
        return max(least, 2 / (self.known.typical.size + 1))  # of many, fewer are drawn

    def p_beyond(self, tolerance: float, around: float = 0.0) -> float:
        """Two-sided p-value of "it is within `tolerance` of `around`"; both as logarithms."""
        above, below = around + tolerance, around - tolerance
        return min(1.0, 2 * min(self.known.p_above(above), self.known.p_below(below)))


def estimate_paired(
    base: Sequence[float], head: Sequence[float], alpha: float = 0.05
) -> RatioEstimate:
    """Blocks of interleaved runs: `base[i]` and `head[i]` (positive, same unit) are of block i.

    Args:
        base: in the order of measurement.
        head: the same.
        alpha: two-sided.

    Raises:
        ValueError: no block, different lengths, or a value that is not positive and finite.
    """
    before, after = _logs(base), _logs(head)
    if not before or len(before) != len(after):
        raise ValueError(f"blocks need both sides: {len(before)} base, {len(after)} head")
    differences = tuple(b - a for a, b in zip(before, after, strict=True))
    known = Rearrangements(subset_means(differences))
    return RatioEstimate(
        True, before, after, fmean(differences), known.interval(alpha), alpha, known
    )


def estimate_unpaired(
    base: Sequence[float], head: Sequence[float], alpha: float = 0.05
) -> RatioEstimate:
    """Two sides measured apart; one run on a side gives a ratio and nothing else.

    Raises:
        ValueError: an empty side, or a value that is not positive and finite.
    """
    before, after = _logs(base), _logs(head)
    if not before or not after:
        raise ValueError(f"both sides need a run: {len(before)} base, {len(after)} head")
    known = Rearrangements(swap_means(before, after))
    log_ratio = fmean(after) - fmean(before)
    return RatioEstimate(False, before, after, log_ratio, known.interval(alpha), alpha, known)


def _logs(values: Sequence[float]) -> tuple[float, ...]:
    bad = next((value for value in values if not 0 < value < math.inf), None)
    if bad is not None:
        raise ValueError(f"a ratio needs positive finite values, found {bad}")
    return tuple(math.log(value) for value in values)
