"""Intervals that contain exactly the changes that the permutation test does not reject.

*Paired* (blocks of interleaved runs): under "no change" which of a block's two runs was called head
is a fair coin, so every difference could as well have the other sign. That holds whatever the
noise looks like (drift, autocorrelation, heavy tails), because the order within a block is drawn.
*Unpaired* (two sweeps made at different times): every split of all runs into the two sides is
equally likely only if nothing but the change differs between them. Time passed is such a thing.

Inverting the test needs no search. A sign flip of the blocks in a set S moves the mean of
(differences - x) at least as far up as it was exactly when the mean over S is at most x. So x is
rejected from below when few of the 2^n - 1 subset means are at most x, and the interval runs from
the k-th smallest to the k-th largest subset mean (Hartigan 1969, "typical values"). For two
unpaired samples the same holds with the sets S that are swapped between the sides (Pitman 1937).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from statistics import fmean

import numpy as np

Interval = tuple[float, float]

MOST_EXACT = 16_384
"""Up to so many rearrangements all are made: 14 blocks, or 8 runs against 8."""

RANDOM_REARRANGEMENTS = 9_999
"""Beyond that, so many are drawn from a fixed seed; the p-value counts the observed one in."""

SEED = 20_260_301


def subset_means(values: Sequence[float]) -> np.ndarray:
    """Means of all non-empty subsets of `values`, sorted: shape (2^n - 1,), or of drawn subsets."""
    if 2 ** len(values) > MOST_EXACT:
        return _drawn_subset_means(np.asarray(values, dtype=float))
    sums, counts = np.zeros(1), np.zeros(1)
    for value in values:
        sums = np.concatenate([sums, sums + value])
        counts = np.concatenate([counts, counts + 1])
    return np.sort(sums[1:] / counts[1:])


def swap_means(base: Sequence[float], head: Sequence[float]) -> np.ndarray:
    """(sum over A - sum over B) / |A| for all A of head, B of base, |A| = |B| > 0; sorted."""
    if math.comb(len(base) + len(head), len(head)) > MOST_EXACT:
        return _drawn_swap_means(np.asarray(base, dtype=float), np.asarray(head, dtype=float))
    means = []
    for size in range(1, min(len(base), len(head)) + 1):
        out = np.array([sum(c) for c in itertools.combinations(head, size)])
        into = np.array([sum(c) for c in itertools.combinations(base, size)])
        means.append(np.subtract.outer(out, into).ravel() / size)
    return np.sort(np.concatenate(means)) if means else np.zeros(0)


@dataclass(frozen=True)
class Rearrangements:
    """What a permutation test inverts to: `typical` is sorted, by one of the functions above."""

    typical: np.ndarray

    def interval(self, alpha: float) -> Interval | None:
        """From the k-th smallest to the k-th largest: what the test does not reject at `alpha`.

        None where nothing can be cut. Exact for differences that are symmetric around the true
        change.
        """
        # The small addition keeps 0.05 / 2 * 40 = 1 from being rounded down to 0.
        cut = math.floor(alpha / 2 * (self.typical.size + 1) + 1e-9)
        if cut < 1:
            return None
        return float(self.typical[cut - 1]), float(self.typical[-cut])

    def p_above(self, bound: float) -> float:
        """One-sided p-value of "the change is at most `bound`"; that of the permutation test."""
        return float(1 + np.searchsorted(self.typical, bound, side="right")) / (
            self.typical.size + 1
        )

    def p_below(self, bound: float) -> float:
        """One-sided p-value of "the change is at least `bound`"."""
        return Rearrangements(-self.typical[::-1]).p_above(-bound)


def _drawn_subset_means(values: np.ndarray) -> np.ndarray:
    chosen = np.random.default_rng(SEED).integers(0, 2, (RANDOM_REARRANGEMENTS, values.size)) == 1
    chosen = chosen[chosen.any(axis=1)]
    return np.sort((chosen @ values) / chosen.sum(axis=1))


def _drawn_swap_means(base: np.ndarray, head: np.ndarray) -> np.ndarray:
    pooled = np.concatenate([head, -base])
    order = np.argsort(
        np.random.default_rng(SEED).random((RANDOM_REARRANGEMENTS, pooled.size)), axis=1
    )
    to_head = order < head.size  # which positions are called head in a rearrangement
    swapped = to_head != (np.arange(pooled.size) < head.size)
    swapped = swapped[swapped.any(axis=1)]
    return np.sort((swapped @ pooled) / (swapped.sum(axis=1) / 2))


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


def estimate(
    base: Sequence[float], head: Sequence[float], alpha: float = 0.05, *, paired: bool
) -> RatioEstimate:
    """Head over base, from positive values in one unit and the order of measurement.

    paired: `base[i]` and `head[i]` are of block i of interleaved runs. Else both sides were made
    apart, where one run on a side gives a ratio and nothing else. alpha: two-sided.

    Raises:
        ValueError: an empty side, a block without both sides, or a value that is not positive and
            finite.
    """
    before, after = _logs(base), _logs(head)
    if not before or not after or (paired and len(before) != len(after)):
        raise ValueError(f"both sides need a run, of each block: {len(before)}, {len(after)}")
    if paired:
        differences = [b - a for a, b in zip(before, after, strict=True)]
        log_ratio, known = fmean(differences), Rearrangements(subset_means(differences))
    else:
        log_ratio, known = fmean(after) - fmean(before), Rearrangements(swap_means(before, after))
    return RatioEstimate(paired, before, after, log_ratio, known.interval(alpha), alpha, known)


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
    raised = np.empty_like(given)
    raised[falling] = np.minimum(1.0, np.minimum.accumulate(scaled))
    return [float(value) for value in raised]


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
