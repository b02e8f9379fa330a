"""Where the next block goes, what a budget can find, and where the spread comes from."""

from __future__ import annotations

import math

import numpy as np
import pytest
from recorded_runs import CELLS, Arm, record_arms

from bench.derive.metrics import STEP_TIME, default_rules
from reports.gates import budget
from reports.gates.budget import ComparisonStatus, next_cell, statuses, statuses_of
from reports.gates.gate import gate
from reports.gates.judgement import MetricSamples, judge_intervals
from reports.gates.pairing import sides_of_arms
from reports.gates.policy import Policy

RULE = default_rules()["step_time"]


def status(
    cell: str, more: float, starts: int = 6, verdict: str = "inconclusive"
) -> ComparisonStatus:
    return ComparisonStatus(cell, "step_time", verdict, starts, more)


def case(differences, *, tolerance=0.02, cell="cell") -> MetricSamples:
    base = dict.fromkeys(range(len(differences)), 100.0)
    head = {block: 100.0 * math.exp(d) for block, d in enumerate(differences)}
    return MetricSamples(cell, base, head, True, tolerance, sequential=True)


A = [status("a", 1.0)]
NEAR_AND_FAR = [status("far", 40.0, 6), status("near", 3.0, 9)]
ON_IT = [status("on it", math.inf, 3), status("near", 5.0, 9)]
DECIDED = [status("a", 3.0), status("b", 0.0, verdict="equivalent")]


@pytest.mark.parametrize(
    ("asked", "seconds", "left", "how", "expected"),
    [
        # Every cell gets a block before any gets a second.
        (A, 1.0, 99.0, {"without_block": ["b", "c"]}, "b"),
        (A, 1.0, 99.0, {"without_block": ["b"], "given_up": ["b"]}, "a"),
        # What can be decided in the time left comes first; with time for all, what was seen less.
        (NEAR_AND_FAR, 10.0, 100.0, {}, "near"),
        (NEAR_AND_FAR, 10.0, 1000.0, {}, "far"),
        # A change on the tolerance itself waits for all others.
        (ON_IT, 1.0, 99.0, {}, "near"),
        (ON_IT[:1], 1.0, 99.0, {}, "on it"),
        # Nothing is started that does not fit, is decided or was given up.
        (DECIDED, 10.0, 9.0, {}, None),
        (DECIDED, 10.0, 11.0, {"given_up": ["a"]}, None),
        (DECIDED, 10.0, 11.0, {}, "a"),
    ],
)
def test_the_next_block_goes_where_it_can_decide_most(asked, seconds, left, how, expected):
    assert next_cell(asked, {one.cell: seconds for one in asked}, left, **how) == expected


def test_a_cheap_block_helps_more_than_an_expensive_one():
    asked = [status("large", 3.0), status("small", 6.0)]
    assert next_cell(asked, {"large": 60.0, "small": 5.0}, 60.0) == "small"


@pytest.mark.parametrize("effect", [0.0, 0.05, -0.1])
def test_a_status_is_the_verdict_that_the_gate_gives(effect):
    rng = np.random.default_rng(1)
    cases = [case(effect + 0.01 * rng.standard_normal(n), cell=str(n)) for n in (4, 8, 12, 20)]
    judged = judge_intervals(cases, STEP_TIME, RULE, 0.05)
    found = statuses_of(cases, STEP_TIME, RULE, 0.05, len(cases))
    assert [one.verdict for one in found] == [one.verdict for one in judged]
    assert all((one.more_starts == 0) == (not one.open) for one in found)


def test_cells_without_a_block_count_among_those_that_are_judged_together():
    differences = [0.1] * 7
    alone = statuses_of([case(differences)], STEP_TIME, RULE, 0.05, 1)
    among = statuses_of([case(differences)], STEP_TIME, RULE, 0.05, 8)
    assert alone[0].verdict == "regressed"
    assert among[0].open


def test_a_sweep_whose_blocks_were_looked_at_is_judged_so_ever_after(store):
    cells = {"zero3": CELLS["zero3"]}
    record_arms(store, {"base": Arm(), "head": Arm(slower=1.1)}, noise=0.003, cells=cells)
    once = gate(sides_of_arms(store, "gate", None, None), Policy(), lambda _: None)
    store.write_plan("gate", store.read_plan("gate") | {"until_decided": True})
    looked = gate(sides_of_arms(store, "gate", None, None), Policy(), lambda _: None)
    times = [[j for j in result.judgements if j.metric == "step_time"] for result in (once, looked)]
    assert [j.sequential for j in times[0]] == [False]
    assert [j.sequential for j in times[1]] == [True]
    assert all(two.interval[0] < one.interval[0] for one, two in zip(*times, strict=True))
    found = statuses(sides_of_arms(store, "gate", None, None).pairs, Policy(), lambda _: None, 1)
    assert [one.verdict for one in found] == [one.verdict for one in times[1]]


def test_a_difference_that_came_out_at_nothing_keeps_no_budget_going(monkeypatch):
    near = MetricSamples("cell", {0: 1.0}, {0: -0.2}, True, 0.02, sequential=True)
    monkeypatch.setattr(budget, "case_of", lambda *_: near)
    assert statuses([near], Policy(), lambda _: None, 1) == []
