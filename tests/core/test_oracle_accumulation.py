"""Microbatches, synchronisation and the cycle: when gradients travel, appear and disappear."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mfsdp_core import MixedPrecisionPolicy, fully_shard_optimizer
from mfsdp_core.errors import GradAlreadyReducedError
from oracle.ranks import RankPool
from oracle.reference import expected_gradient, relative_difference
from oracle.sharded import STRATEGIES, shard

pytestmark = pytest.mark.processes

NAME = "aligned_stack"
WHOLE_GRADIENT = ("no_shard", "optim")


def after_the_error(strategy: str) -> float:
    """Gradient error of a cycle that follows a refused one and a `zero_grad_buffer`."""
    toy = shard(NAME, strategy, 2, torch.float64)
    toy.run_cycle(1)
    with pytest.raises(GradAlreadyReducedError):
        toy.run_cycle(1)
    toy.model.zero_grad_buffer()
    toy.run_cycle(2, cycle=1)
    expected = expected_gradient(NAME, 2, 2, torch.float64, 1)
    return relative_difference(toy.full_gradient(), expected)


def error_after_a_failure(strategy: str, phase: str) -> float:
    """Gradient error of a cycle that follows a pass in which a hook of the second unit raised."""
    toy = shard(NAME, strategy, 2, torch.float64)

    def fail(*_: Any) -> None:
        raise ArithmeticError(phase)

    def fail_backward(_module: Any, _inputs: Any, output: torch.Tensor) -> None:
        output.register_hook(fail)

    unit = toy.model.module.blocks[1]
    hook = unit.register_forward_hook(fail if phase == "forward" else fail_backward)
    with pytest.raises(ArithmeticError):
        toy.backward()
    hook.remove()
    toy.model.zero_grad_buffer()
    toy.run_cycle(2, cycle=1)
    expected = expected_gradient(NAME, 2, 2, torch.float64, 1)
    return relative_difference(toy.full_gradient(), expected)


def communication_peak_bytes(strategy: str, comm: torch.dtype) -> int:
    policy = MixedPrecisionPolicy(torch.float32, torch.float32, comm, reduce_dtype=comm)
    # Direct exchange needs memory for what arrives, whatever the dtypes.
    toy = shard(NAME, strategy, 2, mixed_precision_policy=policy, transport="native")
    optimizer = fully_shard_optimizer(torch.optim.SGD(toy.model.parameters(), lr=0.1))
    for cycle in range(2):
        toy.run_cycle(2, cycle)
        optimizer.step()
        optimizer.zero_grad()
    peaks: dict[str, int] = toy.model.ledger.peak_bytes_by_category()
    return peaks["communication_buffers"]


@pytest.mark.parametrize("strategy", WHOLE_GRADIENT)
def test_zero_grad_makes_a_model_usable_again_after_a_refused_reduction(
    ranks: RankPool, strategy: str
) -> None:
    assert max(ranks.run(after_the_error, strategy)) <= 1e-12


@pytest.mark.sample
@pytest.mark.parametrize("phase", ["forward", "backward"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_pass_that_raised_leaves_no_trace_after_zero_grad(
    ranks: RankPool, strategy: str, phase: str
) -> None:
    assert max(ranks.run(error_after_a_failure, strategy, phase)) <= 1e-12


@pytest.mark.parametrize("strategy", WHOLE_GRADIENT)
def test_no_communication_buffer_exists_where_no_dtype_changes(
    ranks: RankPool, strategy: str
) -> None:
    assert ranks.run(communication_peak_bytes, strategy, torch.float32) == [0] * 4
    assert min(ranks.run(communication_peak_bytes, strategy, torch.bfloat16)) > 0
