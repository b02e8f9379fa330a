"""Intervals that hold at every look: the coin behind them, and what more blocks may not undo."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from reports.statistics.estimate import estimate_paired
from reports.statistics.sequential import (
    STRENGTHS,
    ConfidenceSequence,
    bets,
    log_wealth,
    typical_starts,
)

MAGNITUDES = (0.01, 0.2, 0.003, 0.07, 0.07, 0.0, 0.31, 0.02, 0.001, 0.15)


def every_flip(magnitudes: tuple[float, ...]) -> np.ndarray:
    return np.array(
        [np.multiply(signs, magnitudes) for signs in itertools.product((1, -1), repeat=10)]
    )


@pytest.mark.parametrize("side", [1.0, -1.0])
def test_over_all_sign_flips_the_wealth_is_one_on_average_after_every_start(side):
    """Whatever the sizes are, and though the bets follow the signs seen before."""
    rows = every_flip(MAGNITUDES)
    wealth = np.exp(log_wealth(rows, bets(rows), 0.0, side))
    assert wealth.mean(axis=0) == pytest.approx(np.ones(10))


def test_a_bet_knows_nothing_of_the_difference_it_is_placed_on_or_of_later_ones():
    rows = np.array([MAGNITUDES, (*MAGNITUDES[:4], 9.0, 9.0, 9.0, 9.0, 9.0, 9.0)])
    found = bets(rows)
    assert found.shape == (2, 10, len(STRENGTHS))
    assert np.array_equal(found[0, :5], found[1, :5])
    assert not np.allclose(found[0, 5], found[1, 5])


def test_no_look_at_identical_code_is_believed_more_often_than_promised():
    rng = np.random.default_rng(3)
    modes = 0.1 * (rng.random((2000, 40, 2)) < 0.3)  # three in ten launches are 10 % slower
    rows = modes[..., 0] - modes[..., 1] + 0.01 * rng.standard_normal((2000, 40))
    found = bets(rows)
    highest = [log_wealth(rows, found, 0.0, side).max(axis=1) for side in (1.0, -1.0)]
    assert np.mean(np.maximum(*highest) >= math.log(2 / 0.05)) <= 0.05


def test_the_interval_ends_where_the_p_value_passes_half_of_alpha():
    known = ConfidenceSequence(tuple(0.03 + 0.02 * np.random.default_rng(2).standard_normal(15)))
    low, high = known.interval(0.05)
    assert low < 0.03 < high
    assert known.p_above(low) == pytest.approx(0.025, rel=1e-3)
    assert known.p_below(high) == pytest.approx(0.025, rel=1e-3)


def test_an_interval_mirrors_where_the_sides_change_places():
    differences = tuple(0.03 + 0.02 * np.random.default_rng(2).standard_normal(12))
    low, high = ConfidenceSequence(differences).interval(0.05)
    mirrored = ConfidenceSequence(tuple(-d for d in differences)).interval(0.05)
    assert mirrored == pytest.approx((-high, -low))


def test_what_is_refuted_stays_refuted():
    rng = np.random.default_rng(8)
    differences = tuple(np.concatenate([0.1 + 0.01 * rng.standard_normal(9), -0.1 * np.ones(9)]))
    before = 1.0
    for count in range(1, 19):
        now = ConfidenceSequence(differences[:count]).p_above(0.02)
        assert now <= before
        before = now
    assert before < 0.025  # the later half says the opposite


def test_five_starts_exclude_nothing_and_seven_equal_ones_a_change_of_nothing():
    assert ConfidenceSequence((0.1,) * 5).interval(0.05) is None
    low, _ = ConfidenceSequence((0.1,) * 7).interval(0.05)
    assert low > 0
    assert ConfidenceSequence(()).p_above(0.0) == 1.0


def test_an_estimate_uses_the_sequence_in_the_place_of_the_permutation_test():
    rng = np.random.default_rng(4)
    base = 100 * np.exp(0.01 * rng.standard_normal(10))
    found = estimate_paired(base, 1.1 * base, sequential=True)
    assert found.ratio == pytest.approx(1.1)
    assert found.p_beyond(math.log(1.02)) < 0.05
    assert found.interval == pytest.approx(found.known.interval(0.05))


def test_a_guess_of_the_starts_grows_as_the_distance_shrinks_and_never_ends_on_the_bound():
    guesses = [typical_starts(distance, 0.02, 0.05) for distance in (0.1, 0.04, 0.02, 0.01)]
    assert guesses == sorted(guesses)
    assert 6 <= guesses[0] <= 8
    assert math.isinf(typical_starts(0.0, 0.02, 0.05))
