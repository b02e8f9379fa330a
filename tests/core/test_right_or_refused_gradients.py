"""Gradients that users hook, clip and scale."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mfsdp_core import MixedPrecisionPolicy, clip_grad_norm_
from oracle.beside_torch import WAYS, Pair, beside, near, own_batch
from oracle.models import Chain, loss

pytestmark = pytest.mark.on_ranks


def backward(pair: Pair) -> None:
    for module in pair.both:
        loss(module(own_batch(1))).backward()


#: Losses through transforms, whose graphs lie below those that the transforms make.
TRANSFORMS: tuple[Callable[[Any, Tensor], Tensor], ...] = (
    lambda f, x: torch.func.grad(lambda v: loss(f(v)))(x).square().sum(),
    lambda f, x: torch.func.vjp(f, x)[1](torch.ones_like(x))[0].square().sum(),
    lambda f, x: torch.func.jvp(f, (x,), (torch.ones_like(x),))[1].square().sum(),
    lambda f, x: loss(torch.func.vmap(f)(x)),
)


def train_through_transforms(way: tuple[str, str]) -> None:
    pair = beside(Chain, way)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch's own, of forward mode
        for transform in TRANSFORMS:
            for module in pair.both:
                transform(module, own_batch(0)).backward()
            pair.compare_gradients()
            pair.zero_grad()


@pytest.mark.parametrize("way", WAYS, ids="-".join)
def test_what_transforms_compute_is_trained_through(way: tuple[str, str]) -> None:
    train_through_transforms(way)


def test_memory_that_is_made_while_a_transform_runs_outlives_it() -> None:
    train_through_transforms(("optim_grads_params", "temporary"))


@pytest.mark.parametrize("way", WAYS[:4], ids="-".join)
def test_transforms_of_functions_are_those_of_plain_torch(way: tuple[str, str]) -> None:
    """A gradient of inputs, a batch of calls and a second derivative."""
    plain, model = beside(Chain, way).both
    x = own_batch(0)
    for what, transform in (
        ("gradient", lambda f: torch.func.grad(lambda v: loss(f(v)))(x)),
        ("batch", lambda f: torch.func.vmap(f)(x)),
        ("second", lambda f: torch.func.jacrev(torch.func.grad(lambda v: loss(f(v))))(x[0])),
    ):
        near(what, transform(model), transform(plain))


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
