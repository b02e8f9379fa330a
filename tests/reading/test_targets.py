"""Targets of a sweep with arms: met, missed, undecided; judged from records alone."""

from __future__ import annotations

import re

import pytest
from recorded_runs import ONE, Arm, record_arms

from reports.gates.target_verdicts import TargetResult, judge_targets, target_table
from sweeps.definition import parse_sweep
from sweeps.document import SweepFileError


def judged(store, at_most: float, metric: str = "step_time", **arms) -> TargetResult:
    """`head` half as slow as `base`, and a target for it."""
    how = {"noise": 0.01, "blocks": 6, "cells": ONE, **arms}
    record_arms(store, {"base": Arm(), "head": Arm(slower=0.5)}, **how)
    plan = store.read_plan("gate")
    target = {"cell": "zero3", "base": "base", "head": "head", "metric": metric}
    store.write_plan("gate", plan | {"targets": [target | {"at_most": at_most}]})
    (result,) = judge_targets(store, "gate")
    return result


@pytest.mark.parametrize(
    ("at_most", "verdict"), [(0.55, "met"), (0.5, "undecided"), (0.45, "missed")]
)
def test_the_interval_of_the_ratio_decides_about_a_time(store, at_most, verdict) -> None:
    found = judged(store, at_most)
    assert found.verdict == verdict
    assert found.blocks == 6
    assert found.ratio == pytest.approx(0.5, rel=0.03)
    low, high = found.interval
    assert low < 0.5 < high
    (row,) = target_table([found]).rows
    assert row.cells[:4] == ("zero3", "step_time", verdict, f"{at_most:.2f}")
    assert re.fullmatch(r"base (99|100|101)\.\d ms", row.cells[-3])
    assert re.fullmatch(r"head (49|50|51)\.\d ms", row.cells[-2])


@pytest.mark.parametrize(
    ("at_most", "metric", "how", "verdict", "ratio", "reason"),
    [
        (
            *(0.9, "step_time", {"blocks": 3}, "undecided", 0.5),
            "too few for an interval: 3 blocks, 6 are needed",
        ),
        (0.9, "step_time", {"interleaved": False}, "undecided", 0.5, ""),
        # Memory is judged by the ratio of medians, and a number that no block has by none.
        (1.0, "rss", {"blocks": 1}, "met", 1.0, ""),
        (0.9, "rss", {"blocks": 1}, "missed", 1.0, ""),
        (1.0, "allocator_peak", {}, "unmeasured", None, "none of 6 complete blocks has a number"),
    ],
)
def test_without_an_interval_a_time_is_undecided_and_memory_is_not(
    store, at_most, metric, how, verdict, ratio, reason
) -> None:
    found = judged(store, at_most, metric, **how)
    assert (found.verdict, found.interval) == (verdict, None)
    assert found.ratio == (ratio if ratio in (None, 1.0) else pytest.approx(ratio, rel=0.05))
    assert reason in found.reason


FILE = "name: a\narms:\n  torch: .\n  ours: main\ntargets:\n  - {TARGET}\n"


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("when: {cell: '*'}, base: tosh, head: ours, at_most: {step_time: 0.5}", "torch, ours"),
        ("when: {cell: '*'}, base: torch, head: ours, at_most: {time: 0.5}", "step_time"),
        ("when: {cell: '*'}, base: torch, head: ours, at_most: {step_time: 0.0}", "above 0"),
        ("when: {cell: x}, base: torch, head: ours, at_most: {rss: 1.0}", "matches no cell"),
    ],
)
def test_a_target_that_means_nothing_is_refused_with_its_line(target: str, message: str) -> None:
    with pytest.raises(SweepFileError) as caught:
        parse_sweep(FILE.replace("TARGET", target), "x.yaml")
    assert str(caught.value).startswith("x.yaml:6: ")
    assert message in str(caught.value)


def test_a_target_may_mean_a_cell_that_the_file_includes() -> None:
    base = "when: {cell: '*'}, base: torch, head: ours, at_most: {rss: 1.0}"
    matrix = "matrix: {product: {engine.name: [ddp]}, include: [{engine.name: mfsdp}]}\n"
    target = base.replace("cell: '*'", "engine.name: mfsdp")
    ((when, _),) = parse_sweep(matrix + FILE.replace("TARGET", target), "x.yaml").targets
    assert when.patterns == {"engine.name": ("mfsdp",)}
