"""The loss gate: bitwise, or against the spread of repeats."""

from __future__ import annotations

import random
from itertools import combinations

import pytest

from reports.comparisons.parity import relative_differences
from reports.gates.cell_samples import LossCurve
from reports.gates.loss_gate import SPREAD_FACTOR, judge_loss

STEPS = 40


def curve(
    shift: float = 0.0, *, from_step: int = 1, noise: float = 0.0, seed: int = 0
) -> LossCurve:
    rng = random.Random(seed)
    return LossCurve.of(
        [
            (2 + 3 * 0.9**step) * (1 + (shift if step >= from_step else 0.0) + rng.gauss(0, noise))
            for step in range(1, STEPS + 1)
        ]
    )


NEAR = [curve(noise=1e-4, seed=seed) for seed in range(3)]
BROKEN = LossCurve.of([*curve().values[:4], float("nan"), *curve().values[5:]])


@pytest.mark.parametrize(
    ("base", "head", "mode", "tolerance", "verdict", "said"),
    [
        ([curve(), curve()], [curve()], "bitwise", 0.0, "equivalent", ""),
        # One bit is a difference, and nothing is held to a base that does not repeat itself.
        (
            [curve()],
            [curve(), curve(1e-15, from_step=17)],
            "bitwise",
            1e-5,
            "regressed",
            "first divergent step 17",
        ),
        (
            [curve(), curve(1e-9, from_step=3)],
            [curve()],
            "bitwise",
            0.0,
            "inconclusive",
            "repeats of the base are not bitwise equal (first divergent step 3)",
        ),
        (
            NEAR,
            [curve(0.01, from_step=21, noise=1e-4, seed=9)],
            "spread",
            1e-5,
            "regressed",
            "first divergent step 21:",
        ),
        # A lower loss is a difference too, and the worst head run counts.
        ([curve()], [curve(-0.01)], "spread", 1e-5, "regressed", ""),
        ([curve()], [curve(), curve(0.01)], "spread", 1e-5, "regressed", ""),
        ([curve()], [BROKEN], "spread", 1e-5, "regressed", "first divergent step 5:"),
        ([curve()], [LossCurve.of(curve().values[:30])], "spread", 1e-5, "regressed", "30, 40"),
        ([curve()], [LossCurve.of([])], "spread", 1.0, "regressed", ""),
    ],
)
def test_what_differs_is_named_with_its_first_step(base, head, mode, tolerance, verdict, said):
    found = judge_loss(base, head, mode, tolerance)
    assert found.verdict == verdict
    assert said in found.reason


def test_a_curve_within_the_spread_of_repeats_is_equal():
    base = [curve(noise=0.01, seed=seed) for seed in range(4)]
    apart = (relative_differences(a.values, b.values) for a, b in combinations(base, 2))
    found = judge_loss(base, [curve(noise=0.01, seed=9)], "spread", 1e-5)
    assert found.verdict == "equivalent"
    assert found.bound == pytest.approx(SPREAD_FACTOR * max(map(max, apart)))
    assert "n=4" in found.reason


def test_a_small_steady_shift_is_found_by_the_area_between_the_curves():
    base = [curve(noise=0.002, seed=seed) for seed in range(3)]
    head = curve(0.009, noise=0.002, seed=9)
    found = judge_loss(base, [head], "spread", 1e-5)
    assert max(relative_differences(head.values, base[0].values)) < found.bound
    assert found.verdict == "regressed"


def test_without_repeats_the_bound_is_the_tolerance_and_that_is_said():
    found = judge_loss([curve()], [curve(1e-6)], "spread", 1e-5)
    assert (found.verdict, found.bound) == ("equivalent", 1e-5)
    assert "no repeats" in found.reason
