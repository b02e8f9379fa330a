"""Bias-corrected and accelerated (BCa) bootstrap intervals; shown beside the exact one.

They decide nothing: at 8 blocks they are too narrow (measured in README, "What a gate can see").
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import numpy as np
from scipy import stats

from reports.statistics.interval import Interval
from reports.statistics.permutation import SEED, mean, mean_difference

RESAMPLES = 4_999


def paired_bootstrap(differences: Sequence[float], alpha: float) -> Interval | None:
    """BCa interval of the mean difference; None below 2 blocks or where all are equal."""
    return _interval((np.asarray(differences, dtype=float),), mean, alpha)


def unpaired_bootstrap(
    base: Sequence[float], head: Sequence[float], alpha: float
) -> Interval | None:
    """BCa interval of mean(head) - mean(base); None below 2 runs on a side."""
    data = (np.asarray(head, dtype=float), np.asarray(base, dtype=float))
    return _interval(data, mean_difference, alpha)


def _interval(data: tuple[np.ndarray, ...], statistic: object, alpha: float) -> Interval | None:
    if any(values.size <= 1 or np.ptp(values) == 0 for values in data):
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", stats.DegenerateDataWarning)
        found = stats.bootstrap(
            data,
            statistic,
            vectorized=True,
            n_resamples=RESAMPLES,
            confidence_level=1 - alpha,
            method="BCa",
            rng=np.random.default_rng(SEED),
        ).confidence_interval
    low, high = float(found.low), float(found.high)
    return (low, high) if np.isfinite([low, high]).all() else None
