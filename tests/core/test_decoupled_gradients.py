"""Gradients handed over as `decoupled_grad`, in the dtype in which they were accumulated."""

from __future__ import annotations

import pytest
import torch

from mfsdp_core import MixedPrecisionPolicy, clip_grad_norm_
from oracle.reference import compare, expected_gradient
from oracle.sharded import STRATEGIES, shard

pytestmark = pytest.mark.on_ranks

NAME = "aligned_stack"


@pytest.mark.sample
@pytest.mark.parametrize("main_grads", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_gradient_arrives_in_its_own_dtype_and_without_a_copy(
    strategy: str, main_grads: torch.dtype
) -> None:
    """It is clipped there, and is gone once the next cycle has begun."""
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
    tolerance = 1e-6 if main_grads is torch.float32 else 1e-2
    compare(toy._joined(shards), wanted, tolerance)
    total = torch.stack([value.norm() for value in wanted.values()]).norm()
    norm = float(clip_grad_norm_(toy.model, 0.05))
    assert norm == pytest.approx(float(total), rel=tolerance)
    clipped = {name: value * 0.05 / norm for name, value in wanted.items()}
    compare(toy._joined(shards), clipped, 2 * tolerance)
    toy.model.zero_grad_buffer()
    assert all(p.decoupled_grad is None for p in parameters.values())
