"""Exact tests of "no change" and of "no more than this much change"; scipy does the arithmetic.

*Paired* (blocks of interleaved runs): under "no change" which of a block's two runs was called head
is a fair coin, so every difference could as well have the other sign. That holds whatever the
noise looks like (drift, autocorrelation, heavy tails), because the order within a block is drawn.
*Unpaired* (two sweeps made at different times): every split of all runs into the two sides is
equally likely only if nothing but the change differs between them. Time passed is such a thing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import numpy as np
from scipy import stats

Alternative = Literal["two-sided", "greater", "less"]

MOST_EXACT = 16_384
"""Up to so many rearrangements all are made: 14 blocks, or 8 runs against 8."""

RANDOM_REARRANGEMENTS = 9_999
"""Beyond that, so many are drawn from a fixed seed; the p-value counts the observed one in."""

SEED = 20_260_301


def sign_flip_p(
    differences: Sequence[float], *, null: float = 0.0, alternative: Alternative = "two-sided"
) -> float:
    """P-value of "the differences are centred at `null`": the mean against all sign flips.

    Args:
        differences: log head - log base, one per block, at least one.
        null: the centre under the null hypothesis, as a logarithm.
        alternative: "greater" asks whether the centre is above `null`.
    """
    shifted = np.asarray(differences, dtype=float) - null
    if shifted.size == 1:  # scipy wants two observations; two sign flips need no library
        return 1.0 if alternative == "two-sided" else _single(float(shifted[0]), alternative)
    return _test((shifted,), _mean, kind="samples", count=2**shifted.size, alternative=alternative)


def two_sample_p(
    base: Sequence[float],
    head: Sequence[float],
    *,
    null: float = 0.0,
    alternative: Alternative = "two-sided",
) -> float:
    """P-value of "head is base shifted by `null`": difference of means against all splits.

    Args:
        base: logarithms, at least two.
        head: logarithms, at least two.
        null: log ratio under the null hypothesis.
        alternative: "greater" asks whether head lies above base + `null`.
    """
    before = np.asarray(base, dtype=float)
    after = np.asarray(head, dtype=float) - null
    count = math.comb(before.size + after.size, after.size)
    return _test(
        (after, before), _mean_difference, kind="independent", count=count, alternative=alternative
    )


def _test(
    data: tuple[np.ndarray, ...], statistic: object, *, kind: str, count: int, alternative: str
) -> float:
    resamples = count if count <= MOST_EXACT else RANDOM_REARRANGEMENTS
    result = stats.permutation_test(
        data,
        statistic,
        permutation_type=kind,
        vectorized=True,
        n_resamples=resamples,
        alternative=alternative,
        rng=np.random.default_rng(SEED),
    )
    return float(result.pvalue)


def _mean(values: np.ndarray, axis: int) -> np.ndarray:
    return np.asarray(np.mean(values, axis=axis))


def _mean_difference(head: np.ndarray, base: np.ndarray, axis: int) -> np.ndarray:
    return np.asarray(np.mean(head, axis=axis) - np.mean(base, axis=axis))


def _single(value: float, alternative: Alternative) -> float:
    favours = value > 0 if alternative == "greater" else value < 0
    return 0.5 if favours else 1.0
