"""Everything trains over work that is late, and gives the numbers of work that is in time."""

from __future__ import annotations

import pytest
import torch

from late.programs import WAYS, Case, from_oracle, from_punctual, host_waits
from mfsdp_core import MixedPrecisionPolicy
from mfsdp_core.precision.float8_reference import Float8Reference
from oracle.hybrid import PAIRS
from oracle.sharded import STRATEGIES

pytestmark = [pytest.mark.on_ranks, pytest.mark.sample]

SEEDS = [0, 1]
TOYS = ["linear_stack", "unequal_units", "recomputed", "root_owned"]
GRAPH = {"cuda_graph_mode": True, "fsdp_double_buffer": True}
POLICIES = {
    "bf16": (MixedPrecisionPolicy(grad_comm_dtype=torch.bfloat16), torch.bfloat16),
    "codes": (MixedPrecisionPolicy(weight_codec=Float8Reference("current")), torch.float32),
    "scaled_blocks": (MixedPrecisionPolicy(weight_codec=Float8Reference("block")), torch.float32),
}


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("toy", TOYS)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_weights_are_the_oracles(strategy: str, way: str, toy: str, seed: int) -> None:
    case = Case(strategy, toy=toy, options=WAYS[way])
    assert from_oracle(case, seed) <= 1e-12


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_backward_pass_waits_for_no_device_where_parameters_are_left_out(strategy: str) -> None:
    """The step does, once, since it leaves out what no rank has used."""
    waits, without = host_waits(strategy, 0)
    assert waits == [0, 1, 1, 2]
    assert without == ["module.sides.2.weight"]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("way", ["native", "messages", "fixed_pool"])
@pytest.mark.parametrize(("inner", "outer"), PAIRS)
def test_weights_under_two_axes_are_the_oracles(
    inner: str, outer: str, way: str, seed: int
) -> None:
    case = Case(inner, outer, toy="aligned_stack", options=WAYS[way])
    assert from_oracle(case, seed) <= 1e-12


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("outer", ["", "no_shard"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_replays_of_a_captured_step_give_the_oracles_weights(
    strategy: str, outer: str, seed: int
) -> None:
    """Calls 1 to 4 run, call 5 is captured; it and the two behind it are replays."""
    case = Case(strategy, outer, "aligned_stack", GRAPH, captured=True, steps=7)
    assert from_oracle(case, seed) <= 1e-12


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("outer", ["", "no_shard", "optim"])
@pytest.mark.parametrize("strategy", STRATEGIES[1:])
def test_weights_after_clipping_are_the_oracles(strategy: str, outer: str, seed: int) -> None:
    case = Case(strategy, outer, "aligned_stack", clip_norm=0.05)
    assert from_oracle(case, seed) <= 1e-12


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("outer", ["", "no_shard", "optim"])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("strategy", STRATEGIES[1:])
def test_weights_in_other_dtypes_are_those_of_work_in_time(
    strategy: str, policy: str, outer: str, seed: int
) -> None:
    allocator = "max_pool" if policy == "scaled_blocks" else None
    options = {"mixed_precision_policy": POLICIES[policy][0], "allocator": allocator}
    case = Case(strategy, outer, "aligned_stack", options, dtype=POLICIES[policy][1])
    assert from_punctual(case, seed) == 0.0
