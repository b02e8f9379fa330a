"""The policy file: tolerances, directions, required or advisory; refusals with lines."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from bench.cli.verb import PolicyOption
from bench.derive.metrics import JUDGED_IF_MEASURED, default_rules
from bench.errors import UsageError

ROOT = Path(__file__).parents[2]
WHOLE = """\
alpha: 0.01
metrics:
  step_time: {tolerance: 3%, gate: advisory}
  throughput: {tolerance: 0.05}
  memory: {tolerance: 1%, direction: both}
  loss: {mode: bitwise}
  grad_norm: {tolerance: 0.1%}
  wire_bytes: {gate: off}
"""


def test_every_key_is_read(policy):
    found = policy(WHOLE)
    assert found.alpha == 0.01
    rules = found.rules
    assert (rules["step_time"].tolerance, rules["step_time"].gate) == (0.03, "advisory")
    assert (rules["throughput"].tolerance, rules["throughput"].gate) == (0.05, "required")
    assert (rules["memory"].tolerance, rules["memory"].direction) == (0.01, "both")
    assert rules["loss"].mode == "bitwise"
    assert (rules["grad_norm"].mode, rules["grad_norm"].tolerance) == ("spread", 0.001)
    required = {m.name: rule for m, rule in found.active() if m not in JUDGED_IF_MEASURED}
    assert list(required) == ["step_time", "throughput", "memory", "loss", "grad_norm"]
    assert all(rule.named for rule in required.values())


def test_an_improvement_is_asked_for_in_the_place_of_a_tolerance(policy):
    rule = policy("metrics:\n  step_time: {improve: 5%}\n").rules["step_time"]
    assert (rule.improve, rule.aim, rule.gate) == (0.05, 0.95, "required")


def test_the_policies_of_the_documentation_are_read(policy):
    page = (ROOT / "docs" / "gates.md").read_text()
    blocks = re.findall(r"^```yaml\n(alpha.*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert blocks
    for block in [*blocks, (ROOT / "docs" / "recipes" / "gates.yaml").read_text()]:
        assert policy(block).rules["step_time"].tolerance == 0.03


def test_without_a_file_memory_bytes_and_loss_are_strict_and_time_has_two_per_cent(policy):
    rules = PolicyOption(policy=None).rules().rules
    left_out = policy("metrics:\n  step_time: {tolerance: 3%}\n")
    assert (left_out.rules["memory"], left_out.alpha) == (default_rules()["memory"], 0.05)
    assert left_out.rules["step_time"].gate == "required"
    assert rules["step_time"].tolerance == 0.02
    assert (rules["memory"].tolerance, rules["wire_bytes"].tolerance) == (0.005, 0.0)
    assert rules["throughput"].gate == "off"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("metrics:\n  stepp_time: {}\n", r"gates.yaml:2: unknown key 'stepp_time'"),
        ("metrics:\n  host_time: {}\n", r"'host_time' was removed: use python_calls"),
        ("metrics:\n  memory:\n    tolerence: 1%\n", r"gates.yaml:3: unknown key 'tolerence'"),
        (
            "metrics:\n  memory: {tolerance: -1%}\n",
            r"gates.yaml:2: tolerance: expected a percentage",
        ),
        ("metrics:\n  memory: {tolerance: 3}\n", r"2: tolerance: expected 3% or 0.03, found 3$"),
        ("metrics:\n  loss: {tolerance: 1.0}\n", r"2: tolerance: expected 1% or 0.01, found 1$"),
        ("alpha: 5\n", r"gates.yaml:1: alpha: expected 5% or 0.05, found 5$"),
        ("metrics:\n  memory: {tolerance: 2000%}\n", r"fraction such as 0.02, from 0 to 1000%"),
        ("metrics:\n  memory: {tolerance: true}\n", r"from 0 to 1000%, found True"),
        ("metrics:\n  copies: {tolerance: 2%}\n", "counts have no tolerance; name what may rise"),
        ("allow:\n  - {operation: aten.copy_, count: 4}\n", "expected a list of {operation: NAME"),
        ("metrics:\n  memory: {gate: must}\n", r"gate: expected one of required, advisory, off"),
        ("metrics:\n  memory: 2%\n", r"memory: expected a mapping"),
        ("metrics: [memory]\n", r"gates.yaml:1: expected metrics with their rules"),
        ("metrics:\n  loss: {direction: lower_is_better}\n", r"moves is a change either way"),
        ("metrics:\n  memory: {mode: bitwise}\n", r"unknown key 'mode'"),
        (
            "metrics:\n  loss: {mode: bitwise, tolerance: 1%}\n",
            r"gates.yaml:2: loss: bitwise has no tolerance; remove one",
        ),
        (
            "metrics:\n  memory: {improve: 5%, tolerance: 1%}\n",
            r"gates.yaml:2: memory: improve stands in the place of tolerance and direction",
        ),
        ("metrics:\n  memory: {improve: 5}\n", r"2: improve: expected 5% or 0.05, found 5$"),
        ("metrics:\n  memory: {improve: 120%}\n", r"improve: expected a percentage"),
        ("alpha: 0\n", r"alpha must be above 0"),
        ("alpha: 1.0e-300\n", r"alpha must be above 0, at least 1e-06"),
        ("alpha: 0.9\n", r"gates.yaml:1: alpha: expected .* from 0 to 50%"),
        ("", r"the file is empty; expected a mapping \(`metrics: ...`\)"),
        ("# alpha: 0.1\n", r"no content; expected a mapping \(`metrics: ...`\)"),
        ("- a\n", r"expected a mapping \(`metrics: ...`\), found a list"),
        ("a: [\n", r"not valid YAML"),
    ],
)
def test_a_wrong_policy_is_refused_with_its_line(policy, text, message):
    with pytest.raises(UsageError, match=message):
        policy(text)
