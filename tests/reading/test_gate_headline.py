"""The first line of a gate says what was not decided, beside what was."""

from __future__ import annotations

import pytest
from gate_runs import Arm, record_arms

from bench.derive.metrics import MetricRule, default_rules
from reports.gates.gate import gate
from reports.gates.gate_text import headline
from reports.gates.pairing import sides_of_arms
from reports.gates.policy import Policy

ADVISORY = Policy(
    rules={**default_rules(), "step_time": MetricRule("advisory", 0.02, "lower_is_better")}
)


def first_line(store, policy: Policy, blocks: int, **arm) -> str:
    record_arms(store, {"base": Arm(), "head": Arm(**arm)}, blocks=blocks)
    return headline(gate(sides_of_arms(store, "gate", None, None), policy, lambda _: None))


def test_a_gate_that_passes_without_a_time_says_so(store):
    assert first_line(store, ADVISORY, 1, slower=2.2).startswith("PASSED, time not decided: ")


def test_a_gate_whose_times_are_decided_passes_plainly(store):
    assert first_line(store, ADVISORY, 12).startswith("PASSED: ")


def test_a_gate_without_times_says_nothing_of_them(store):
    rules = {**default_rules(), "step_time": MetricRule("off", None, "lower_is_better")}
    assert first_line(store, Policy(rules=rules), 1).startswith("PASSED: ")


@pytest.mark.parametrize("state", ["crashed", "hang"])
def test_a_failed_run_is_no_pass(store, state):
    assert "PASSED" not in first_line(store, ADVISORY, 1, states={0: state})
