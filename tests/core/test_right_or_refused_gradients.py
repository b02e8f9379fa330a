"""Gradients that users hook, clip, scale and take over as `decoupled_grad`."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from mfsdp_core import MixedPrecisionPolicy, clip_grad_norm_
from oracle.beside_torch import WAYS, beside, own_batch
from oracle.models import Chain, loss
from oracle.reference import compare, expected_gradient
from oracle.sharded import STRATEGIES, shard

pytestmark = pytest.mark.on_ranks

TOY = "aligned_stack"


@pytest.mark.parametrize("way", WAYS, ids="-".join)
def test_hooks_of_before_sharding_run_on_the_gradient_of_the_rank(way: tuple[str, str]) -> None:
    """As under DDP."""

    def factory() -> nn.Module:
        chain = Chain()
        chain.head.weight.register_hook(lambda g: g * 0.5)
        return chain

    pair = beside(factory, way)
    pair.backward(own_batch(1))
    pair.compare_gradients()


@pytest.mark.parametrize("way", WAYS, ids="-".join)
def test_scaling_keeps_what_clipping_did(way: tuple[str, str]) -> None:
    """Norms of BF16 main gradients after clip, scale, and both in the other order."""
    pair = beside(Chain, way, dtype=torch.bfloat16, mixed_precision_policy=MixedPrecisionPolicy())
    for first, wanted in (("clip", 0.5e-3), ("scale", 1e-3)):
        loss(pair.model(own_batch(1).bfloat16())).backward()
        if first == "scale":
            pair.model.scale_gradients(0.5)
        clip_grad_norm_(pair.model, 1e-3)
        if first == "clip":
            pair.model.scale_gradients(0.5)
        norm = float(clip_grad_norm_(pair.model, float("inf")))
        assert norm == pytest.approx(wanted, rel=0.02), f"{first} first: {norm}"
        pair.model.zero_grad()


@pytest.mark.parametrize("way", WAYS, ids="-".join)
def test_gradients_that_the_user_has_put_there_are_scaled_once(way: tuple[str, str]) -> None:
    """Copies, and the same memory under another name."""
    for replace in (torch.clone, torch.Tensor.detach):
        pair = beside(Chain, way)
        pair.backward(own_batch(1))
        for parameter in pair.model.parameters():
            parameter.grad = replace(parameter.grad)
        pair.model.scale_gradients(0.5)
        pair.compare_gradients(times=0.5)


@pytest.mark.sample
@pytest.mark.parametrize("main_grads", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_gradient_arrives_in_its_own_dtype_and_without_a_copy(
    strategy: str, main_grads: torch.dtype
) -> None:
    """It is clipped there, and is gone once the next cycle has begun."""
    policy = MixedPrecisionPolicy(torch.float32, main_grads, main_grads)
    toy = shard(TOY, strategy, 2, mixed_precision_policy=policy, use_decoupled_grad=True)
    resting = toy.model.ledger.bytes_by_category()
    toy.run_cycle(2)
    after = toy.model.ledger.bytes_by_category()
    assert {k: v for k, v in after.items() if k != "gradients" and v != resting[k]} == {}
    parameters = dict(toy.parameters())
    assert all(p.grad is None for p in parameters.values())
    shards = {name: p.decoupled_grad for name, p in parameters.items()}
    assert {value.dtype for value in shards.values()} == {main_grads}
    wanted = expected_gradient(TOY, 2, 2, torch.float32, 0)
    tolerance = 1e-6 if main_grads is torch.float32 else 1e-2
    compare(toy._joined(shards), wanted, tolerance)
    total = torch.stack([value.norm() for value in wanted.values()]).norm()
    norm = float(clip_grad_norm_(toy.model, 0.05))
    assert norm == pytest.approx(float(total), rel=tolerance)
    clipped = {name: value * 0.05 / norm for name, value in wanted.items()}
    compare(toy._joined(shards), clipped, 2 * tolerance)
    toy.model.zero_grad_buffer()
    assert all(p.decoupled_grad is None for p in parameters.values())
