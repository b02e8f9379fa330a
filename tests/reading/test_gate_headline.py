"""The first line of a gate says what was not decided, beside what was."""

from __future__ import annotations

import pytest
from recorded_runs import judged_arms

from bench.derive.metrics import MetricRule, default_rules
from reports.gates.gate_text import headline
from reports.gates.policy import Policy


@pytest.mark.parametrize(
    ("time", "arms", "begins"),
    [
        ("advisory", {"blocks": 1, "slower": 2.2}, "PASSED, time not decided: "),
        ("advisory", {"blocks": 12}, "PASSED: "),
        ("off", {"blocks": 1}, "PASSED: "),  # without times nothing is said of them
        ("advisory", {"blocks": 1, "states": {0: "crashed"}}, "FAILED TO MEASURE"),
        ("advisory", {"blocks": 1, "states": {0: "hang"}}, "FAILED TO MEASURE"),
    ],
)
def test_the_first_line(store, time, arms, begins):
    rules = {**default_rules(), "step_time": MetricRule(time, 0.02, "lower_is_better")}
    assert headline(judged_arms(store, Policy(rules=rules), **arms)).startswith(begins)
