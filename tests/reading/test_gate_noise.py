"""Noise calibrations: the floor, and that no tolerance falls below it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from recorded_runs import CELLS, ONE, Arm, judged_arms, record_arms

from bench.derive.metrics import CPU_TIME, STEP_TIME, THROUGHPUT, default_rules
from bench.errors import NothingMeasuredError, UsageError
from bench.store import ResultsStore
from reports.compare.judge import judge
from reports.compare.noise import NoiseCalibration, calibrate
from reports.compare.policy import Policy
from reports.compare.sides import sides_of_arms
from reports.compare.text import outcome_blocks
from reports.renderers.render import render

MEASURED = "2026-03-01T10:00:00.000Z"


def calibrated(store, *, noise: float = 0.02, blocks: int = 8, **arms: Arm) -> NoiseCalibration:
    record_arms(store, {"a": Arm(), "b": Arm()} | arms, sweep="aa", noise=noise, blocks=blocks)
    pairs = sides_of_arms(store, "aa", "a", "b").pairs
    return calibrate(pairs, sweep="aa", measured_utc=MEASURED)


@pytest.fixture(scope="module")
def usual(tmp_path_factory) -> NoiseCalibration:
    """The calibration of a machine with 2 % of noise, for tests that only read it."""
    folder = tmp_path_factory.mktemp("usual") / "results"
    return calibrated(ResultsStore.open(folder, create=True))


def test_the_floor_is_the_largest_change_that_identical_code_could_not_exclude(usual):
    found = usual
    for cell in found.cells:
        assert cell.low < cell.change < cell.high
        assert cell.floor == pytest.approx(max(cell.high, 1 / (1 + cell.low) - 1))
    assert 0.002 < found.floor(CELLS["ddp"].config_hash) < 0.1
    # One that was not calibrated gets the largest; a metric that was not, none.
    assert found.floor("another") == max(cell.floor for cell in found.cells)
    assert found.floor(CELLS["ddp"].config_hash, CPU_TIME) == 0.0
    assert NoiseCalibration.from_document(found.to_document()) == found


def test_cpu_time_has_a_floor_of_its_own_and_wall_time_keeps_its(store):
    quiet = Arm(cpu_noise=0.001)
    found = calibrated(store, noise=0.05, a=quiet, b=quiet)
    config = CELLS["ddp"].config_hash
    assert found.floor(config, CPU_TIME) < 0.01 < found.floor(config)
    assert found.floor(config, THROUGHPUT) == found.floor(config, STEP_TIME)
    assert "of step time, 0." in found.describe()
    assert "of CPU time" in found.describe()


def test_cpu_time_finds_what_the_noise_of_wall_time_hides(store):
    base = Arm(cpu_noise=0.001)
    judged = judged_arms(store, None, base, cpu_noise=0.001, slower=1.05, noise=0.2)
    verdicts = {(one.metric, one.verdict, one.required) for one in judged.judgements}
    assert ("cpu_time", "regressed", False) in verdicts
    assert ("step_time", "regressed", True) not in verdicts
    assert "cpu_time" in render(outcome_blocks(judged))


def test_few_blocks_and_code_that_differs_are_no_calibration(store):
    with pytest.raises(NothingMeasuredError, match="at least 6 blocks"):
        calibrated(store, blocks=5)
    with pytest.raises(UsageError, match="not the same code"):
        calibrated(store, b=Arm(code="code-2"))


def test_no_tolerance_falls_below_the_floor(store):
    calibration = calibrated(store, noise=0.05)
    record_arms(store, {"base": Arm(), "head": Arm(slower=1.03)}, noise=0.001)
    sides = sides_of_arms(store, "gate")
    without = judge(sides)
    with_floor = judge(sides, Policy(), lambda _: calibration)
    low = judge(sides, Policy(), lambda _: calibrated(store, noise=0.001))
    assert {j.tolerance for j in low.judgements if j.metric == "step_time"} == {0.02}
    assert without.regressed
    assert not with_floor.regressed
    times = with_floor.of_metric("step_time")
    assert all(j.floor and j.tolerance > 0.02 for j in times)
    assert "(noise)" in render(outcome_blocks(with_floor))


@pytest.mark.parametrize(
    ("slower", "floor", "verdict"),
    [
        (0.97, None, "improved"),
        (0.97, 0.04, "inconclusive"),  # identical code may seem so much faster
        (0.90, 0.04, "improved"),
        (1.10, 0.04, "missed"),
    ],
)
def test_an_improvement_must_be_shown_beyond_the_floor(store, usual, slower, floor, verdict):
    cells = tuple(replace(cell, low=0.0, high=floor or 0.0) for cell in usual.cells)
    record_arms(store, {"base": Arm(), "head": Arm(slower=slower)}, noise=0.001, cells=ONE)
    rule = replace(STEP_TIME.rule, improve=0.01)
    policy = Policy({**default_rules(), "step_time": rule})
    known = None if floor is None else replace(usual, cells=cells)
    judged = judge(sides_of_arms(store, "gate"), policy, lambda _: known)
    (found,) = judged.of_metric("step_time")
    assert found.verdict == verdict
    assert found.floor == (floor is not None)


def test_a_gate_without_calibration_says_so_and_one_with_it_says_how_old_it_is(store, usual):
    record_arms(store, {"base": Arm(), "head": Arm()}, blocks=1)
    sides = sides_of_arms(store, "gate")
    assert "has no noise calibration" in render(outcome_blocks(judge(sides)))
    text = render(outcome_blocks(judge(sides, Policy(), lambda _: usual)))
    assert "calibrated 2026-03-01 (3 cells)" in text


@pytest.mark.parametrize(
    "damage",
    [
        {"noise_version": 2},
        {"cells": []},
        {"cells": [{}]},
        {"hardware": {"kind": "cpu"}},
        {"measured_utc": "yesterday"},
    ],
)
def test_a_damaged_calibration_is_refused_with_the_remedy(usual, damage):
    document = usual.to_document() | damage
    with pytest.raises(UsageError, match=r"calibrat(e|ion).* again"):
        NoiseCalibration.from_document(document)
