"""Steady state: what is always dropped, what is cut, what is refused, what is forgiven."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.derive.steady import DROPPED_STEPS, MIN_WINDOW_STEPS, steady_window

RUNS = 300


def noisy(rng, count):
    """Step times of a busy machine: 4 % noise, every seventh step 1.5 to 4 times slower."""
    times = 300.0 * (1 + 0.04 * rng.standard_normal(count))
    hit = rng.random(count) < 1 / 7
    times[hit] *= rng.uniform(1.5, 4.0, hit.sum())
    return times


def pareto(rng, count):
    return 300.0 * (1 + 0.05 * rng.pareto(1.5, count))


def warming(rng, count):
    times = noisy(rng, count)
    times[:5] *= [6.0, 3.0, 2.2, 1.8, 1.5]
    return times


@pytest.mark.parametrize(
    ("series", "count", "cut"),
    [(noisy, 16, 0), (noisy, 24, 0), (pareto, 20, 0), (warming, 24, 0.95)],
)
def test_series_with_outliers_are_stable_almost_always_and_a_warm_up_is_cut(series, count, cut):
    rng = np.random.default_rng(count)
    windows = [steady_window(series(rng, count).tolist()) for _ in range(RUNS)]
    assert sum(window.stable for window in windows) > 0.98 * RUNS
    assert sum(window.first > 5 for window in windows) >= cut * RUNS


@pytest.mark.parametrize("direction", [1, -1])
def test_strong_trends_are_refused_almost_always_and_the_reason_gives_their_size(direction):
    rng = np.random.default_rng(8)
    refused = []
    for _ in range(RUNS):
        times = 300 * (1 + 0.03 * rng.standard_normal(24)) * np.linspace(1, 1.5, 24)[::direction]
        window = steady_window(times.tolist())
        refused += [window.reason] * (not window.stable)
    assert len(refused) > 0.95 * RUNS
    assert "the rolling median " + ("rises" if direction == 1 else "falls") in refused[0]


def test_a_small_drift_is_forgiven_however_regular_it_is():
    times = [100.0 * (1 + 0.04 * i / 40) for i in range(40)]
    assert steady_window(times).stable


def test_a_single_huge_step_neither_moves_nor_breaks_the_window():
    times = [100.0 + i % 3 for i in range(24)]
    plain = steady_window(times)
    assert (plain.first, plain.stable) == (DROPPED_STEPS + 1, True)
    times[15] = times[0] = 1e6
    assert steady_window(times) == plain


@pytest.mark.parametrize("count", [0, 1, DROPPED_STEPS + MIN_WINDOW_STEPS - 1])
def test_too_few_steps_give_no_number_and_say_how_many_are_needed(count):
    window = steady_window([100.0] * count)
    assert not window.stable
    assert f"{count} steps" in window.reason
    assert str(DROPPED_STEPS + MIN_WINDOW_STEPS) in window.reason


@pytest.mark.parametrize("broken", [float("nan"), float("inf"), 0.0, -3.0])
def test_a_time_that_is_none_is_named_by_its_step(broken):
    times = [100.0] * 20
    times[11] = broken
    window = steady_window(times)
    assert not window.stable
    assert "step 12" in window.reason


times_of_steps = st.lists(
    st.floats(0.01, 1e6), min_size=DROPPED_STEPS + MIN_WINDOW_STEPS, max_size=60
)


@given(times_of_steps)
@settings(deadline=None)
def test_the_first_steps_never_count_and_half_of_the_run_always_remains(times):
    window = steady_window(times)
    assert DROPPED_STEPS < window.first <= window.last == len(times)
    assert window.last - window.first + 1 >= min(
        len(times) - DROPPED_STEPS, max(MIN_WINDOW_STEPS, len(times) // 2)
    )
    assert window.stable == (window.reason == "")


@pytest.mark.parametrize("slow", [0, 2, 3, 5])
def test_the_window_begins_after_the_last_slow_step_and_ends_with_the_run(slow):
    window = steady_window([*(100.0 - 5 * i for i in range(slow)), *[10.0, 10.1] * 8][:16])
    assert (window.first, window.last, window.stable) == (max(slow, 2) + 1, 16, True)
