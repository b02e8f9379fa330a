"""Gradients that users hook, clip and scale."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mfsdp_core import MixedPrecisionPolicy, clip_grad_norm_
from oracle.beside_torch import WAYS, beside, distance, own_batch
from oracle.models import Chain, loss
from oracle.ranks import RankPool

pytestmark = pytest.mark.processes


def hooked_before_sharding(way: tuple[str, str]) -> float:
    """A hook of the bare parameter sees each rank's own gradient, as under DDP."""

    def factory() -> nn.Module:
        chain = Chain()
        chain.head.weight.register_hook(lambda g: g * 0.5)
        return chain

    pair = beside(factory, way)
    for module in pair.both:
        loss(module(own_batch(1))).backward()
    return pair.worst_gradient()


def clipped_then_scaled(way: tuple[str, str]) -> list[float]:
    """Norms of BF16 main gradients after clip, scale, and both in the other order."""
    pair = beside(Chain, way, dtype=torch.bfloat16, mixed_precision_policy=MixedPrecisionPolicy())
    norms = []
    for first in ("clip", "scale"):
        loss(pair.model(own_batch(1).bfloat16())).backward()
        if first == "scale":
            pair.model.scale_gradients(0.5)
        clip_grad_norm_(pair.model, 1e-3)
        if first == "clip":
            pair.model.scale_gradients(0.5)
        norms.append(float(clip_grad_norm_(pair.model, float("inf"))))
        pair.model.zero_grad()
    return norms


def transformed(way: tuple[str, str]) -> list[float]:
    """Errors of a gradient of inputs, a batch of calls and a second derivative by `torch.func`."""
    pair = beside(Chain, way)
    x = own_batch(0)
    gradients = [torch.func.grad(lambda v, f=f: loss(f(v)))(x) for f in pair.both]
    mapped = [torch.func.vmap(f)(x).detach() for f in pair.both]
    bent = [torch.func.jacrev(torch.func.grad(lambda v, f=f: loss(f(v))))(x[0]) for f in pair.both]
    pairs = (gradients, mapped, [one.detach() for one in bent])
    return [distance(found, wanted) for wanted, found in pairs]


#: Losses through transforms, whose graphs lie below those that the transforms make.
TRANSFORMS: tuple[Callable[[Any, Tensor], Tensor], ...] = (
    lambda f, x: torch.func.grad(lambda v: loss(f(v)))(x).square().sum(),
    lambda f, x: torch.func.vjp(f, x)[1](torch.ones_like(x))[0].square().sum(),
    lambda f, x: torch.func.jvp(f, (x,), (torch.ones_like(x),))[1].square().sum(),
    lambda f, x: loss(torch.func.vmap(f)(x)),
)


def trained_through_transforms(way: tuple[str, str]) -> list[float]:
    """Errors of gradients of parameters."""
    pair = beside(Chain, way)
    errors = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch's own, of forward mode
        for transform in TRANSFORMS:
            for module in pair.both:
                transform(module, own_batch(0)).backward()
            errors.append(pair.worst_gradient())
            pair.zero_grad()
    return errors


@pytest.mark.parametrize("way", WAYS, ids="-".join)
def test_what_transforms_compute_is_trained_through(ranks: RankPool, way: tuple[str, str]) -> None:
    for errors in ranks.run(trained_through_transforms, way):
        assert max(errors) < 1e-12, errors


def test_memory_that_is_made_while_a_transform_runs_outlives_it(ranks: RankPool) -> None:
    for errors in ranks.run(trained_through_transforms, ("optim_grads_params", "temporary")):
        assert max(errors) < 1e-12, errors


@pytest.mark.parametrize("way", WAYS[:4], ids="-".join)
def test_transforms_of_functions_are_those_of_plain_torch(
    ranks: RankPool, way: tuple[str, str]
) -> None:
    for errors in ranks.run(transformed, way):
        assert max(errors) < 1e-12


@pytest.mark.parametrize("way", WAYS, ids="-".join)
def test_hooks_of_before_sharding_run_on_the_gradient_of_the_rank(
    ranks: RankPool, way: tuple[str, str]
) -> None:
    assert max(ranks.run(hooked_before_sharding, way)) < 1e-12


@pytest.mark.parametrize("way", WAYS, ids="-".join)
def test_scaling_keeps_what_clipping_did(ranks: RankPool, way: tuple[str, str]) -> None:
    for clipped_first, scaled_first in ranks.run(clipped_then_scaled, way):
        assert clipped_first == pytest.approx(0.5e-3, rel=0.02)
        assert scaled_first == pytest.approx(1e-3, rel=0.02)


def one_of_nan() -> float:
    """The worst gradient of a pair that is right except for one NaN."""
    pair = beside(Chain, WAYS[0])
    for module in pair.both:
        loss(module(own_batch(1))).backward()
    next(iter(pair.model.parameters())).grad.to_local().view(-1)[0] = torch.nan
    return pair.worst_gradient()


def test_a_gradient_of_nan_is_a_wrong_one(ranks: RankPool) -> None:
    assert ranks.run(one_of_nan) == [torch.inf] * 4
