"""Verdicts: from run medians and a tolerance, and from loss curves and the spread of repeats."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import combinations

import pytest
from recorded_runs import ONE, Arm, interleaved, judged_arms, record_arms

from bench.derive.metrics import (
    CPU_TIME,
    MEMORY,
    RSS,
    STEP_TIME,
    THROUGHPUT,
    MetricRule,
    default_rules,
)
from reports.compare.ci import to_junit
from reports.compare.judge import (
    SPREAD_FACTOR,
    Judgement,
    judge,
    judge_curve,
    judge_intervals,
    judge_values,
)
from reports.compare.policy import Policy, parse_policy
from reports.compare.series import NORMS, Curve, Gap
from reports.compare.sides import Pair, samples_of, sides_of_baseline
from reports.compare.text import headline

TIME = default_rules()["step_time"]
STEPS = 40


def case(effect: float, *, blocks: int = 8, noise: float = 0.005, paired: bool = True) -> Pair:
    rng = random.Random(blocks + round(1000 * effect))
    base = [100 * rng.gauss(1, noise) for block in range(blocks)]
    head = [100 * effect * rng.gauss(1, noise) for block in range(blocks)]
    return interleaved("cell", base, head, paired=paired)


def first(*cases: Pair, rule: MetricRule = TIME, metric=STEP_TIME) -> Judgement:
    """What is said of the first of cells that are judged together."""
    return judge_intervals(list(cases), metric, rule, 0.05)[0]


UNCHANGED = [case(1.0 + i / 1e6) for i in range(11)]
BOTH_WAYS = {"rule": MetricRule("required", 0.02, "both")}
OF_THROUGHPUT = {"rule": default_rules()["throughput"], "metric": THROUGHPUT}
TOO_FEW = ["smallest p-value", "at least 6 blocks"]


@pytest.mark.parametrize(
    ("cases", "how", "verdict", "said"),
    [
        # The interval against the tolerance decides.
        ([case(1.10)], {}, "regressed", []),
        ([case(0.90)], {}, "improved", []),
        ([case(1.0)], {}, "equivalent", []),
        ([case(1.02)], {}, "inconclusive", ["neither inside nor beyond the tolerance of 2.0 %"]),
        ([case(0.9)], BOTH_WAYS, "regressed", []),
        ([case(1 / 1.1)], OF_THROUGHPUT, "regressed", []),
        # Too few runs say how many could decide.
        ([case(2.0, blocks=1)], {}, "inconclusive", TOO_FEW),
        ([case(2.0, blocks=5)], {}, "inconclusive", TOO_FEW),
        ([case(1.1, blocks=4, paired=False)], {}, "regressed", []),
        (
            [case(1.1, blocks=3, paired=False)],
            {},
            "inconclusive",
            ["cannot decide with 3 against 3 runs", "at least 4 runs on each side"],
        ),
        # One cell of twelve needs more blocks than one alone.
        (
            [case(1.1), *UNCHANGED],
            {},
            "inconclusive",
            ["not after adjustment for 12 cells", "at least 9 blocks"],
        ),
        ([case(1.1, blocks=9), *UNCHANGED], {}, "regressed", []),
    ],
)
def test_samples_are_judged_by_their_interval_which_says_what_it_lacks(cases, how, verdict, said):
    found = first(*cases, **how)
    assert (found.verdict, found.paired) == (verdict, cases[0].paired)
    assert [words for words in said if words not in found.reason] == []


BETTER = replace(TIME, improve=0.05)
FASTER = {"rule": replace(OF_THROUGHPUT["rule"], improve=0.05), "metric": THROUGHPUT}


@pytest.mark.parametrize(
    ("effect", "how", "verdict"),
    [
        (0.90, {"rule": BETTER}, "improved"),
        (0.97, {"rule": BETTER}, "missed"),
        (1.10, {"rule": BETTER}, "missed"),
        (0.95, {"rule": BETTER}, "inconclusive"),
        (1.10, FASTER, "improved"),
        (1.02, FASTER, "missed"),
        (0.90, FASTER, "missed"),
    ],
)
def test_an_improvement_that_is_asked_for_must_be_shown(effect, how, verdict):
    found = first(case(effect), **how)
    assert (found.verdict, found.tolerance) == (verdict, None)
    assert ("the policy asks for 5.0 % better" in found.reason) == (verdict != "improved")


@pytest.mark.parametrize(
    ("metric", "improve", "base", "head", "verdict"),
    [
        (MEMORY, 0.05, [100.0], 90.0, "improved"),
        (MEMORY, 0.05, [100.0], 95.0, "improved"),
        (MEMORY, 0.05, [100.0], 96.0, "missed"),
        (MEMORY, 0.05, [100.0, 90.0], 96.0, "inconclusive"),
        # Resident memory, by more than it repeats to.
        (RSS, 0.02, [1.0], 0.96, "inconclusive"),
        (RSS, 0.02, [1.0], 0.92, "improved"),
        (RSS, 0.02, [1.0], 1.04, "missed"),
    ],
)
def test_less_memory_that_is_asked_for_must_be_shown(metric, improve, base, head, verdict):
    rule, tolerance = replace(metric.rule, improve=improve), RSS.least_tolerance
    tolerance = tolerance if metric is RSS else 0.0
    assert judge_values(case(1.0), metric, rule, (base, [head]), tolerance).verdict == verdict


@pytest.mark.parametrize(("slower", "verdict"), [(0.9, "improved"), (0.99, "missed")])
def test_a_gate_without_the_improvement_fails_and_says_so(store, slower, verdict):
    policy = Policy({**default_rules(), "step_time": BETTER})
    result = judged_arms(store, policy, slower=slower, noise=0.003, cells=ONE)
    assert [one.verdict for one in result.of_metric("step_time")] == [verdict]
    outcomes = {"missed": "regressed", "improved": "passed"}
    assert result.outcome == outcomes.get(verdict, "undecided")
    line = headline(result)
    assert line.startswith("NOT IMPROVED: 1 missed" if result.regressed else "PASSED"), line
    assert ("<failure" in to_junit(result, strict=False)) == result.regressed


def test_a_change_that_is_significant_but_within_the_tolerance_is_equivalent():
    found = first(case(1.01, noise=0.001))
    assert found.verdict == "equivalent"
    assert found.interval[0] > 1


def test_time_change_throughput_change_and_ratio_go_together_also_where_batches_differ():
    slower = first(case(1 / 1.10), **OF_THROUGHPUT)
    assert slower.ratio == pytest.approx(1 / 1.10, rel=0.01)
    assert slower.time_ratio == pytest.approx(1 / slower.throughput_ratio)
    even = case(1.0)
    found = first(replace(even, head=replace(even.head, tokens_per_step=2.0)))
    assert found.time_ratio == pytest.approx(1.0, rel=0.01)
    assert found.throughput_ratio == pytest.approx(2.0 / found.time_ratio)


def test_only_blocks_that_both_sides_have_are_paired():
    one = case(1.1)
    head = {block: time for block, time in one.head.of(STEP_TIME).items() if block != 3}
    found = first(replace(one, head=replace(one.head, values={"step_time": head})))
    assert found.n_base == found.n_head == 7


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
    assert judge_values(case(1.0), MEMORY, rule, (base, head), 0.005).verdict == expected


@pytest.mark.parametrize(("blocks", "least"), [(14, 1.2e-4), (20, 2e-4)])
def test_what_no_number_of_blocks_could_decide_names_none(blocks, least):
    base = [100.0 + n / 100 for n in range(blocks)]
    slower = interleaved("slower", base, [1.5 * time for time in base])
    (judged,) = judge_intervals([slower], STEP_TIME, STEP_TIME.rule, 1e-4)
    assert f"possible is {least:.2g}, and 0.0001 is needed; no number of blocks" in judged.reason
    cells = [interleaved(str(n), base, base) for n in range(9)]
    several = judge_intervals([slower, *cells], STEP_TIME, STEP_TIME.rule, 0.001)
    assert several[0].verdict == "inconclusive"
    assert several[0].reason.endswith("larger alpha, or judge fewer cells with --only")


def test_a_time_that_came_out_at_nothing_has_no_ratio_and_the_other_cells_have_one():
    near = interleaved("near", [5.0, 0.0], [4.0, 3.0])
    far = interleaved("far", [5.0, 5.0], [4.0, 4.0])
    judged = judge_intervals([near, far], CPU_TIME, CPU_TIME.rule, 0.05)
    assert [(one.cell, one.verdict) for one in judged] == [
        ("near", "unmeasured"),
        ("far", "inconclusive"),
    ]
    assert judged[0].reason == "1 of 2 runs of the base measure nothing above zero"


def of_values(values) -> Curve:
    return Curve.of(dict(enumerate(values, start=1)))


def curve(shift: float = 0.0, *, from_step: int = 1, noise: float = 0.0, seed: int = 0) -> Curve:
    rng = random.Random(seed)
    return of_values(
        (2 + 3 * 0.9**step) * (1 + (shift if step >= from_step else 0.0) + rng.gauss(0, noise))
        for step in range(1, STEPS + 1)
    )


NEAR = [curve(noise=1e-4, seed=seed) for seed in range(3)]
MOVED = curve(0.01, from_step=21, noise=1e-4, seed=9)
BROKEN = of_values([*curve().values[:4], float("nan"), *curve().values[5:]])
UNSTABLE = [curve(), curve(1e-9, from_step=3)]


@pytest.mark.parametrize(
    ("base", "head", "mode", "verdict", "said"),
    [
        ([curve(), curve()], [curve()], "bitwise", "equivalent", ""),
        # One bit is a difference, and nothing is held to a base that does not repeat itself.
        ([curve()], [curve(), curve(1e-15, from_step=17)], "bitwise", "regressed", "step 17"),
        (UNSTABLE, [curve()], "bitwise", "inconclusive", "not bitwise equal (first divergent step"),
        (NEAR, [MOVED], "spread", "regressed", "first divergent step 21:"),
        # A lower loss is a difference too, and the worst head run counts.
        ([curve()], [curve(-0.01)], "spread", "regressed", ""),
        ([curve()], [curve(), curve(0.01)], "spread", "regressed", ""),
        ([curve()], [BROKEN], "spread", "regressed", "nan at step 5, where the base"),
        ([curve()], [of_values(curve().values[:30])], "spread", "regressed", "30, 40"),
        ([curve()], [of_values([])], "spread", "regressed", ""),
        # Without repeats the bound is the tolerance, and that is said.
        ([curve()], [curve(1e-6)], "spread", "equivalent", "no repeats"),
    ],
)
def test_a_loss_that_differs_is_named_with_its_first_step(base, head, mode, verdict, said):
    found = judge_curve(base, head, mode, (1e-5, 1e-5))
    assert found.verdict == verdict
    assert said in found.reason


def test_a_step_that_the_head_alone_does_not_have_is_a_regression():
    base, steps = curve(), curve().steps
    head = replace(base, steps=(*steps[:4], *steps[5:]), values=base.values[:4] + base.values[5:])
    found = judge_curve([base], [head], "spread", (1e-5, 1e-5))
    assert found.verdict == "regressed"
    assert found.reason == f"the head has no value at 1 step of the base, first at {steps[4]}"
    assert judge_curve([head], [base], "spread", (1e-5, 1e-5)).verdict == "equivalent"


def test_a_curve_within_the_spread_of_repeats_is_equal():
    base = [curve(noise=0.01, seed=seed) for seed in range(4)]
    apart = [abs(Gap.of(b.by_step, a.by_step).largest) for a, b in combinations(base, 2)]
    found = judge_curve(base, [curve(noise=0.01, seed=9)], "spread", (1e-5, 1e-5))
    assert found.verdict == "equivalent"
    assert found.bound == pytest.approx(SPREAD_FACTOR * max(apart))
    assert "n=4" in found.reason


def test_a_small_steady_shift_is_found_by_the_area_between_the_curves():
    base = [curve(noise=0.002, seed=seed) for seed in range(3)]
    head = curve(0.009, noise=0.002, seed=9)
    found = judge_curve(base, [head], "spread", (1e-5, 1e-5))
    assert abs(Gap.of(base[0].by_step, head.by_step).largest) < found.bound
    assert found.verdict == "regressed"


def test_a_gradient_four_times_too_large_regresses_where_every_loss_is_the_same(store):
    found = judged_arms(store, norm_scale=4.0, blocks=2, cells=ONE)
    verdicts = {one.metric: (one.verdict, one.required) for one in found.judgements}
    assert verdicts["loss"] == ("equivalent", True)
    assert verdicts["grad_norm"] == ("regressed", True)
    assert "grad_norm (spread) +300.0 %" in headline(found)
    written = to_junit(found)
    assert 'type="regressed"' in written
    assert "first divergent step 1" in written


def test_norms_may_part_where_they_peak_but_not_at_the_first_step_nor_in_the_median():
    base = [of_values([1.0] * STEPS)]
    bounds = NORMS.bounds(1e-5)
    for moved, verdict in (
        ({7: 1.2}, "equivalent"),
        ({1: 1 + 2e-5}, "regressed"),
        (dict.fromkeys(range(10, 40), 1 + 2e-4), "regressed"),
        (dict.fromkeys(range(10, 40), 1 + 5e-5), "equivalent"),
    ):
        head = [of_values([moved.get(step, 1.0) for step in range(1, STEPS + 1)])]
        found = judge_curve(base, head, "spread", bounds, NORMS)
        assert (found.verdict, moved) == (verdict, moved)


def test_a_loss_that_moves_by_a_millionth_does_not_read_as_no_change(store):
    exact = MetricRule("required", 1e-7, "both")
    policy = Policy(default_rules() | {"loss": exact})
    found = judged_arms(store, policy, loss_shift=1e-6, blocks=2, cells=ONE)
    assert "loss (spread) +1.0e-06" in headline(found)


def test_a_policy_may_ask_for_every_bit_of_the_gradient_norms(store):
    policy = parse_policy({"metrics": {"grad_norm": {"mode": "bitwise"}}}, lambda _: 0, "p.yaml")
    found = judged_arms(store, policy, norm_scale=1 + 1e-9, blocks=2, cells=ONE)
    (norm,) = found.of_metric("grad_norm")
    assert (norm.verdict, norm.detail) == ("regressed", "bitwise")


def test_a_baseline_of_before_that_has_no_norms_regresses_nothing(store):
    record_arms(store, {None: Arm()}, cells=ONE, blocks=2)
    (base,) = samples_of(store, "gate")
    older = replace(base, curves=base.curves | {"grad_norm": ()})
    found = judge(sides_of_baseline(store, "main", [older], "gate"))
    (norm,) = found.of_metric("grad_norm")
    assert (norm.verdict, norm.required) == ("unmeasured", False)


def test_a_negative_loss_that_rises_has_a_positive_change(store):
    found = judged_arms(store, base=Arm(loss_shift=-2.0), loss_shift=-1.5, blocks=2, cells=ONE)
    (loss,) = found.of_metric("loss")
    assert loss.change == pytest.approx(0.5)
