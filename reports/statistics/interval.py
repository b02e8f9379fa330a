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
    found = []
    for size in range(1, min(len(base), len(head)) + 1):
        out = np.array([sum(c) for c in itertools.combinations(head, size)])
        into = np.array([sum(c) for c in itertools.combinations(base, size)])
        found.append(np.subtract.outer(out, into).ravel() / size)
    return np.sort(np.concatenate(found)) if found else np.zeros(0)


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
        return _p_above(self.typical, bound)

    def p_below(self, bound: float) -> float:
        """One-sided p-value of "the change is at least `bound`"."""
        return _p_above(-self.typical[::-1], -bound)


def _p_above(typical: np.ndarray, bound: float) -> float:
    return float(1 + np.searchsorted(typical, bound, side="right")) / (typical.size + 1)


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
