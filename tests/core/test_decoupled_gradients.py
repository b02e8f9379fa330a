"""Gradients handed over as `decoupled_grad`, in the dtype in which they were accumulated."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from mfsdp_core import MixedPrecisionPolicy, clip_grad_norm_, fully_shard_optimizer
from oracle.reference import compare, expected_gradient, train
from oracle.sharded import STRATEGIES, shard

pytestmark = pytest.mark.on_ranks

NAME = "aligned_stack"


class ReadsDecoupled(torch.optim.Optimizer):
    """SGD on `decoupled_grad`, whatever its dtype. Not our code: the reader's side of the deal."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # noqa: ARG002
        for group in self.param_groups:
            for parameter in group["params"]:
                gradient = parameter.decoupled_grad.to_local().to(parameter.dtype)
                parameter.to_local().add_(gradient, alpha=-group["lr"])


@pytest.mark.sample
@pytest.mark.parametrize("main_grads", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_gradient_arrives_in_its_own_dtype_and_without_a_copy(
    strategy: str, main_grads: torch.dtype
) -> None:
    """And is gone once the next cycle has begun."""
    policy = MixedPrecisionPolicy(torch.float32, main_grads, main_grads)
    toy = shard(NAME, strategy, 2, mixed_precision_policy=policy, use_decoupled_grad=True)
    resting = toy.model.ledger.bytes_by_category()
    toy.run_cycle(2)
    after = toy.model.ledger.bytes_by_category()
    assert {k: v for k, v in after.items() if k != "gradients" and v != resting[k]} == {}
    parameters = dict(toy.parameters())
    assert all(p.grad is None for p in parameters.values())
    shards = {name: p.decoupled_grad for name, p in parameters.items()}
    assert {value.dtype for value in shards.values()} == {main_grads}
    wanted = expected_gradient(NAME, 2, 2, torch.float32, 0)
    compare(toy._joined(shards), wanted, 1e-6 if main_grads is torch.float32 else 1e-2)
    toy.model.zero_grad_buffer()
    assert all(p.decoupled_grad is None for p in parameters.values())


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_training_and_clipping_on_decoupled_gradients_follow_the_reference(strategy: str) -> None:
    make = partial(torch.optim.SGD, lr=0.1)
    expected, norms = train(NAME, 2, 2, 3, make, clip_norm=0.05)
    toy = shard(NAME, strategy, 2, torch.float64, use_decoupled_grad=True)
    optimizer = fully_shard_optimizer(ReadsDecoupled(toy.model.parameters(), lr=0.1))
    for cycle, wanted in enumerate(norms):
        toy.run_cycle(2, cycle)
        norm = float(clip_grad_norm_(toy.model, 0.05))
        assert norm == pytest.approx(wanted, rel=1e-12)
        optimizer.step()
        optimizer.zero_grad()
    found = toy.full_parameters()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-12, atol=1e-12)
