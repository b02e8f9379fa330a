"""Exact tests of "no change"; scipy does the arithmetic.

*Paired* (blocks of interleaved runs): under "no change" which of a block's two runs was called head
is a fair coin, so every difference could as well have the other sign. That holds whatever the
noise looks like (drift, autocorrelation, heavy tails), because the order within a block is drawn.
*Unpaired* (two sweeps made at different times): every split of all runs into the two sides is
equally likely only if nothing but the change differs between them. Time passed is such a thing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from scipy import stats

MOST_EXACT = 16_384
"""Up to so many rearrangements all are made: 14 blocks, or 8 runs against 8."""

RANDOM_REARRANGEMENTS = 9_999
"""Beyond that, so many are drawn from a fixed seed; the p-value counts the observed one in."""

SEED = 20_260_301


def sign_flip_p(differences: Sequence[float]) -> float:
    """Two-sided p-value of "the differences are centred at 0": the mean against all sign flips.

    Args:
        differences: log head - log base, one per block, at least one.
    """
    if len(differences) == 1:  # scipy wants two observations; two sign flips need no library
        return 1.0
    data = (np.asarray(differences, dtype=float),)
    return _test(data, mean, kind="samples", count=2 ** len(differences))


def two_sample_p(base: Sequence[float], head: Sequence[float]) -> float:
    """Two-sided p-value of "both sides are alike": difference of means against all splits.

    Args:
        base: logarithms, at least two.
        head: logarithms, at least two.
    """
    data = np.asarray(head, dtype=float), np.asarray(base, dtype=float)
    count = math.comb(len(base) + len(head), len(head))
    return _test(data, mean_difference, kind="independent", count=count)


def _test(data: tuple[np.ndarray, ...], statistic: object, *, kind: str, count: int) -> float:
    result = stats.permutation_test(
        data,
        statistic,
        permutation_type=kind,
        vectorized=True,
        n_resamples=count if count <= MOST_EXACT else RANDOM_REARRANGEMENTS,
        rng=np.random.default_rng(SEED),
    )
    return float(result.pvalue)


def mean(values: np.ndarray, axis: int) -> np.ndarray:
    """The statistic of a paired comparison."""
    return np.asarray(np.mean(values, axis=axis))


def mean_difference(head: np.ndarray, base: np.ndarray, axis: int) -> np.ndarray:
    """The statistic of an unpaired one."""
    return np.asarray(np.mean(head, axis=axis) - np.mean(base, axis=axis))
