"""What runs decide: a ratio of times with what is known about it, and many cells at once.

Three runs against three can be split in 20 ways, so the most extreme outcome there is has a
two-sided p-value of 2/20 = 0.10: no effect, however large, is significant at 5 %. Many cells are
many chances for a false alarm, so p-values are adjusted (Benjamini-Hochberg).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from statistics import fmean

import numpy as np

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


MOST_RUNS = 64


def adjusted(p_values: Sequence[float]) -> list[float]:
    """P-values adjusted so that at most alpha of all alarms raised at alpha are false on average.

    Valid for independent and for positively dependent tests (cells measured side by side).
    """
    given = np.asarray(p_values, dtype=float)
    falling = np.argsort(-given, kind="stable")
    scaled = given[falling] * (given.size / np.arange(given.size, 0, -1))
    found = np.empty_like(given)
    found[falling] = np.minimum(1.0, np.minimum.accumulate(scaled))
    return [float(value) for value in found]


def smallest_p(base: int, head: int, *, paired: bool) -> Fraction:
    """Two-sided p-value when every head lies beyond its base, at most 1.

    Of n blocks 2 / 2^n; of runs measured apart 2 / (base + head choose head).
    """
    return min(Fraction(1), Fraction(2, 2**base if paired else math.comb(base + head, head)))


def smallest_deciding_n(alpha: float, *, paired: bool, tests: int = 1) -> int:
    """Fewest blocks (or runs per side) with which one changed cell among `tests` could be found.

    Benjamini-Hochberg asks of a single small p-value among `tests` that it is at most alpha/tests.

    Raises:
        ValueError: more than `MOST_RUNS` would be needed.
    """
    bound = Fraction(str(alpha)) / max(1, tests)
    for runs in range(1, MOST_RUNS + 1):
        if smallest_p(runs, runs, paired=paired) <= bound:
            return runs
    raise ValueError(f"no number of runs up to {MOST_RUNS} decides at {alpha} among {tests} tests")
