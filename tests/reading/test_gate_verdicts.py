"""Verdicts from run medians and a tolerance."""

from __future__ import annotations

import random

import pytest

from bench.derive.metrics import HOST_TIME, MEMORY, STEP_TIME, THROUGHPUT, MetricRule, default_rules
from reports.gates.judgement import MetricSamples, judge_intervals, judge_values

TIME = default_rules()["step_time"]


def case(effect: float, *, blocks: int = 8, noise: float = 0.005, paired: bool = True, **changes):
    rng = random.Random(blocks + round(1000 * effect))
    base = {block: 100 * rng.gauss(1, noise) for block in range(blocks)}
    head = {block: 100 * effect * rng.gauss(1, noise) for block in range(blocks)}
    return MetricSamples("cell", base, head, paired, **{"tolerance": 0.02, **changes})


def verdict(
    *cases: MetricSamples, rule: MetricRule = TIME, metric=STEP_TIME, alpha: float = 0.05
) -> str:
    return judge_intervals(list(cases), metric, rule, alpha)[0].verdict


@pytest.mark.parametrize(
    ("effect", "expected"),
    [(1.10, "regressed"), (0.90, "improved"), (1.0, "equivalent"), (1.02, "inconclusive")],
)
def test_the_interval_against_the_tolerance_decides(effect, expected):
    assert verdict(case(effect)) == expected


def test_a_change_that_is_significant_but_within_the_tolerance_is_equivalent():
    found = judge_intervals([case(1.01, noise=0.001)], STEP_TIME, TIME, 0.05)[0]
    assert found.verdict == "equivalent"
    assert found.interval[0] > 1


def test_throughput_is_the_mirror_of_time():
    rule = default_rules()["throughput"]
    slower = judge_intervals([case(1 / 1.10)], THROUGHPUT, rule, 0.05)[0]
    assert slower.verdict == "regressed"
    assert slower.ratio == pytest.approx(1 / 1.10, rel=0.01)
    assert slower.time_ratio == pytest.approx(1 / slower.throughput_ratio)


def test_time_change_throughput_change_and_ratio_go_together_also_where_batches_differ():
    found = judge_intervals([case(1.0, tokens_ratio=2.0)], STEP_TIME, TIME, 0.05)[0]
    assert found.time_ratio == pytest.approx(1.0, rel=0.01)
    assert found.throughput_ratio == pytest.approx(2.0 / found.time_ratio)


def test_a_direction_of_both_calls_every_change_a_regression():
    assert verdict(case(0.9), rule=MetricRule("required", 0.02, "both")) == "regressed"


@pytest.mark.parametrize(("blocks", "needed"), [(1, 6), (3, 6), (5, 6)])
def test_too_few_blocks_decide_nothing_and_say_how_many_could(blocks, needed):
    found = judge_intervals([case(2.0, blocks=blocks)], STEP_TIME, TIME, 0.05)[0]
    assert found.verdict == "inconclusive"
    assert f"at least {needed} blocks" in found.reason
    assert "smallest p-value" in found.reason


def test_unpaired_runs_are_judged_as_such():
    found = judge_intervals([case(1.1, blocks=4, paired=False)], STEP_TIME, TIME, 0.05)[0]
    assert (found.verdict, found.paired) == ("regressed", False)
    three = judge_intervals([case(1.1, blocks=3, paired=False)], STEP_TIME, TIME, 0.05)[0]
    assert three.verdict == "inconclusive"
    assert "cannot decide with 3 against 3 runs" in three.reason
    assert "at least 4 runs on each side" in three.reason


def test_only_blocks_that_both_sides_have_are_paired():
    one = case(1.1)
    head = {block: time for block, time in one.head.items() if block != 3}
    found = judge_intervals(
        [MetricSamples("cell", one.base, head, True, 0.02)], STEP_TIME, TIME, 0.05
    )[0]
    assert found.n_base == found.n_head == 7


def test_one_cell_of_twelve_needs_more_blocks_than_one_cell_alone():
    still = [case(1.0 + i / 1e6) for i in range(11)]
    alone = judge_intervals([case(1.1)], STEP_TIME, TIME, 0.05)[0]
    among = judge_intervals([case(1.1), *still], STEP_TIME, TIME, 0.05)[0]
    assert (alone.verdict, among.verdict) == ("regressed", "inconclusive")
    assert "not after adjustment for 12 cells" in among.reason
    assert "at least 9 blocks" in among.reason
    assert verdict(case(1.1, blocks=9), *still) == "regressed"


def test_an_undecided_interval_is_named():
    found = judge_intervals([case(1.02)], STEP_TIME, TIME, 0.05)[0]
    assert "neither inside nor beyond the tolerance of 2.0 %" in found.reason


@pytest.mark.parametrize(
    ("base", "head", "expected"),
    [
        ([1000], [1004], "equivalent"),
        ([1000], [1006], "regressed"),
        ([1000], [990], "improved"),
        ([0], [0], "equivalent"),
        ([0], [8], "regressed"),
        ([1000, 1020], [1010, 1030], "inconclusive"),
    ],
)
def test_what_repeats_exactly_gates_with_one_run_a_side(base, head, expected):
    rule = default_rules()["memory"]
    assert judge_values("cell", MEMORY, rule, base, head, tolerance=0.005).verdict == expected


def test_a_difference_that_came_out_at_nothing_has_no_ratio_and_the_other_cells_have_one():
    """Host time is a difference of two passes."""
    near = MetricSamples("near", {0: 5.0, 1: -0.5}, {0: 4.0, 1: 3.0}, True, 0.05)
    far = MetricSamples("far", {0: 5.0, 1: 5.0}, {0: 4.0, 1: 4.0}, True, 0.05)
    judged = judge_intervals([near, far], HOST_TIME, HOST_TIME.rule, 0.05)
    assert [(one.cell, one.verdict) for one in judged] == [
        ("near", "unmeasured"),
        ("far", "inconclusive"),
    ]
    assert judged[0].reason == "1 of 2 runs of the base measure nothing above zero"
