"""The arithmetic below verdicts: exact tests, their intervals, sample sizes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from statistics import fmean

import numpy as np
import pytest
from scipy import stats

from reports.compare.statistics import (
    MOST_EXACT,
    Rearrangements,
    adjusted,
    estimate,
    smallest_deciding_n,
    smallest_p,
    subset_means,
    swap_means,
)


def sign_flip_p(differences: Sequence[float], alternative: str = "two-sided") -> float:
    """By scipy's permutation test; one-sided of "the centre is at most nothing"."""
    how = {"permutation_type": "samples", "n_resamples": 10**6, "alternative": alternative}
    return float(stats.permutation_test((np.asarray(differences),), np.mean, **how).pvalue)


def two_sample_p(base: Sequence[float], head: Sequence[float]) -> float:
    """The same of two samples, head less base."""

    def apart(one: np.ndarray, other: np.ndarray, axis: int) -> np.ndarray:
        return np.mean(one, axis=axis) - np.mean(other, axis=axis)

    data = np.asarray(head), np.asarray(base)
    return float(stats.permutation_test(data, apart, n_resamples=10**6).pvalue)


@pytest.mark.parametrize(("n", "m"), [(2, 2), (3, 6), (5, 7)])
def test_the_p_value_is_that_of_the_permutation_test(n, m):
    rng = np.random.default_rng(n + m)
    base, head = rng.normal(size=n), rng.normal(size=m) + 0.5
    found = estimate(np.exp(base), np.exp(head), paired=False).p_beyond(0.0)
    assert found == pytest.approx(two_sample_p(base, head))
    both = list(rng.normal(0.3, 1.0, n))
    found = estimate([1.0] * n, np.exp(both), paired=True).p_beyond(0.0)
    assert found == pytest.approx(sign_flip_p(both))


@pytest.mark.parametrize("n", [6, 9])
def test_the_paired_interval_holds_exactly_what_the_test_does_not_reject(n):
    rng = np.random.default_rng(n)
    for _ in range(10):
        differences = list(rng.standard_t(3, n) * 0.01 + 0.004)
        known = Rearrangements(subset_means(differences))
        low, high = known.interval(0.05)
        assert known.p_above(0.01) == pytest.approx(
            sign_flip_p(np.subtract(differences, 0.01), "greater")
        )
        for inside in (low + 1e-9, high - 1e-9, fmean(differences)):
            assert sign_flip_p(np.subtract(differences, inside)) > 0.05
        for outside in (low - 1e-9, high + 1e-9):
            assert sign_flip_p(np.subtract(differences, outside)) <= 0.05


@pytest.mark.parametrize(("n", "m"), [(4, 4), (5, 7)])
def test_the_unpaired_interval_holds_exactly_what_the_test_does_not_reject(n, m):
    rng = np.random.default_rng(n * m)
    for _ in range(5):
        base, head = rng.normal(size=n), rng.normal(size=m) + 1.0
        low, high = Rearrangements(swap_means(base, head)).interval(0.05)
        for inside in (low + 1e-9, high - 1e-9):
            assert two_sample_p(base, head - inside) > 0.05
        for outside in (low - 1e-9, high + 1e-9):
            assert two_sample_p(base, head - outside) <= 0.05


def test_three_against_three_and_five_blocks_can_never_be_significant():
    assert [smallest_p(n, n, paired=False) for n in (3, 4)] == [Fraction(2, 20), Fraction(2, 70)]
    three = estimate([1, 1.01, 1.02], [50, 51, 52], paired=False)
    assert three.interval is None
    assert three.p_beyond(0.0) == pytest.approx(2 / math.comb(6, 3))  # every split is counted
    assert [smallest_p(n, n, paired=True) for n in (5, 6)] == [0.0625, 0.03125]
    assert estimate([1] * 5, [2, 2.1, 2.2, 2.3, 2.4], paired=True).interval is None
    assert estimate([1] * 6, [2, 2.1, 2.2, 2.3, 2.4, 2.5], paired=True).interval is not None


@pytest.mark.parametrize(
    ("paired", "tests", "needed"),
    [(True, 1, 6), (True, 3, 7), (True, 12, 9), (False, 1, 4), (False, 12, 6)],
)
def test_the_smallest_n_that_could_decide(paired, tests, needed):
    assert smallest_deciding_n(0.05, paired=paired, tests=tests) == needed
    possible = [smallest_p(n, n, paired=paired) for n in (needed, needed - 1)]
    assert possible[0] <= 0.05 / tests < possible[1]


def test_many_cells_are_adjusted_by_benjamini_and_hochberg():
    assert adjusted([0.01, 0.04, 0.03, 0.5]) == pytest.approx([0.04, 0.16 / 3, 0.16 / 3, 0.5])
    assert adjusted([]) == []
    drawn = np.random.default_rng(2).uniform(size=50) ** 3
    assert adjusted(drawn) == pytest.approx(stats.false_discovery_control(drawn, method="bh"))


def test_many_blocks_draw_rearrangements_and_stay_close_to_the_t_interval():
    rng = np.random.default_rng(8)
    differences = rng.normal(0.01, 0.01, 40)
    assert MOST_EXACT < 2**40
    found, again = (Rearrangements(subset_means(list(differences))).interval(0.05) for _ in "ab")
    wanted = stats.t.interval(0.95, 39, differences.mean(), stats.sem(differences))
    assert found == pytest.approx(wanted, abs=4e-4)
    assert again == found  # nothing is left to chance


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf])
def test_a_time_that_is_no_positive_number_is_refused(bad):
    with pytest.raises(ValueError, match="positive finite"):
        estimate([1.0, bad], [1.0, 1.0], paired=True)
    with pytest.raises(ValueError, match="both sides"):
        estimate([1.0], [1.0, 2.0], paired=True)
    with pytest.raises(ValueError, match="need a run"):
        estimate([], [1.0], paired=False)
