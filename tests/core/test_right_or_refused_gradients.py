"""Gradients that users hook, clip and scale."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from mfsdp_core import MixedPrecisionPolicy, clip_grad_norm_
from oracle.beside_torch import WAYS, Pair, beside, own_batch
from oracle.models import Chain, loss

pytestmark = pytest.mark.on_ranks


def backward(pair: Pair) -> None:
    for module in pair.both:
        loss(module(own_batch(1))).backward()


@pytest.mark.parametrize("way", WAYS, ids="-".join)
def test_hooks_of_before_sharding_run_on_the_gradient_of_the_rank(way: tuple[str, str]) -> None:
    """As under DDP."""

    def factory() -> nn.Module:
        chain = Chain()
        chain.head.weight.register_hook(lambda g: g * 0.5)
        return chain

    pair = beside(factory, way)
    backward(pair)
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


def test_a_gradient_of_nan_is_a_wrong_one() -> None:
    """Of the comparison itself."""
    pair = beside(Chain, WAYS[0])
    backward(pair)
    next(iter(pair.model.parameters())).grad.to_local().view(-1)[0] = torch.nan
    with pytest.raises(AssertionError, match="off by inf"):
        pair.compare_gradients()
