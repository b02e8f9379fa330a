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


def test_too_few_blocks_decide_nothing(store) -> None:
    found = judged(store, 0.9, blocks=3)
    assert (found.verdict, found.interval) == ("undecided", None)
    assert found.reason == "too few for an interval: 3 blocks, 6 are needed"
    assert found.ratio == pytest.approx(0.5, rel=0.05)


def test_runs_that_were_not_interleaved_decide_nothing(store) -> None:
    assert judged(store, 0.9, interleaved=False).verdict == "undecided"


@pytest.mark.parametrize(("at_most", "verdict"), [(1.0, "met"), (0.9, "missed")])
def test_memory_is_judged_by_the_ratio_of_medians(store, at_most, verdict) -> None:
    found = judged(store, at_most, "rss", blocks=1)
    assert (found.verdict, found.ratio) == (verdict, 1.0)


def test_a_number_that_no_block_has_is_unmeasured(store) -> None:
    found = judged(store, 1.0, "allocator_peak")
    assert found.verdict == "unmeasured"
    assert found.reason == "none of 6 complete blocks has a number"


def test_the_table_names_both_arms_with_their_medians(store) -> None:
    (row,) = target_table([judged(store, 0.55)]).rows
    assert row.cells[:4] == ("zero3", "step_time", "met", "0.55")
    assert re.fullmatch(r"base (99|100|101)\.\d ms", row.cells[-3])
    assert re.fullmatch(r"head (49|50|51)\.\d ms", row.cells[-2])


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
