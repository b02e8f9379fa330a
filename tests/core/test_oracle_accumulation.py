"""Microbatches, synchronisation and the cycle: when gradients travel, appear and disappear."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mfsdp_core import MixedPrecisionPolicy, fully_shard_optimizer
from mfsdp_core.errors import GradAlreadyReducedError
from oracle.sharded import STRATEGIES, shard

pytestmark = pytest.mark.on_ranks

NAME = "aligned_stack"
WHOLE_GRADIENT = ("no_shard", "optim")


@pytest.mark.parametrize("strategy", WHOLE_GRADIENT)
def test_zero_grad_makes_a_model_usable_again_after_a_refused_reduction(strategy: str) -> None:
    toy = shard(NAME, strategy, 2, torch.float64)
    toy.run_cycle(1)
    with pytest.raises(GradAlreadyReducedError):
        toy.run_cycle(1)
    toy.model.zero_grad_buffer()
    toy.run_cycle(2, cycle=1)
    toy.compare_gradient(2, cycle=1)


@pytest.mark.sample
@pytest.mark.parametrize("phase", ["forward", "backward"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_pass_that_raised_leaves_no_trace_after_zero_grad(strategy: str, phase: str) -> None:
    """A hook of the second unit raised."""
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
    toy.compare_gradient(2, cycle=1)


@pytest.mark.parametrize("comm", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("strategy", WHOLE_GRADIENT)
def test_no_communication_buffer_exists_where_no_dtype_changes(
    strategy: str, comm: torch.dtype
) -> None:
    policy = MixedPrecisionPolicy(torch.float32, torch.float32, comm, reduce_dtype=comm)
    # Direct exchange needs memory for what arrives, whatever the dtypes.
    toy = shard(NAME, strategy, 2, mixed_precision_policy=policy, transport="native")
    optimizer = fully_shard_optimizer(torch.optim.SGD(toy.model.parameters(), lr=0.1))
    for cycle in range(2):
        toy.run_cycle(2, cycle)
        optimizer.step()
        optimizer.zero_grad()
    peak = toy.model.ledger.peak_bytes_by_category()["communication_buffers"]
    assert (peak > 0) == (comm is torch.bfloat16), peak
