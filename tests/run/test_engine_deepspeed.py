"""DeepSpeed's adapter: what it undoes of the package, seen from the ranks that a validation has."""

from __future__ import annotations

import pytest

from bench.testing.workers import ForkServer
from bench.validate.cases import Case
from bench.validate.session import WorkerSettings, verdicts
from bench.verdict import CaseVerdict

DEEPSPEED = "examples.engines.deepspeed:build"
pytestmark = [pytest.mark.processes, pytest.mark.needs("deepspeed")]
#: Stage 3 rounds once more in its linear layer. `rows` has 973 elements, buckets an even size.
CASES = {
    "stage 3": Case(DEEPSPEED, "optim_grads_params", policy="bf16"),
    "stage 3 again": Case(DEEPSPEED, "optim_grads_params", policy="bf16", microbatches=2),
    "another engine after stage 3": Case("fsdp2", "optim_grads_params", policy="bf16"),
    "an odd number of elements": Case(DEEPSPEED, "optim_grads", model="rows", policy="fp32"),
}


@pytest.fixture(scope="module")
def found(fork_server: ForkServer) -> dict[str, CaseVerdict]:
    """Of cases one after another on the same ranks."""
    one_set = WorkerSettings(case_seconds=100.0)
    return dict(zip(CASES, verdicts(fork_server, CASES.values(), one_set), strict=True))


@pytest.mark.parametrize("name", ["stage 3", "stage 3 again"])
def test_the_linear_layer_of_stage_3_rounds_once_more_than_plain_bf16(found, name):
    failures = [check.check for check in found[name].failures]
    assert failures == ["gradients", "freed after deletion"], found[name]


def test_the_linear_layer_of_stage_3_is_gone_with_its_engine(found):
    verdict = found["another engine after stage 3"]
    assert verdict.state == "passed", verdict.failures


def test_a_model_with_an_odd_number_of_elements_trains(found):
    verdict = found["an odd number of elements"]
    assert {check.check for check in verdict.failures} <= {"freed after deletion"}, verdict
    done = {check.check for check in verdict.checks if check.state == "passed"}
    assert {"losses", "gradients", "optimizer step"} <= done
