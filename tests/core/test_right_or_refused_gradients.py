"""Gradients that users hook, clip and scale."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mfsdp_core import MixedPrecisionPolicy, clip_grad_norm_, fully_shard_optimizer, gather_full
from mfsdp_core.errors import LifecycleError
from oracle.beside_torch import WAYS, Chain, beside, distance, mean_over_ranks, own_batch, refusal
from oracle.models import loss
from oracle.ranks import RankPool

pytestmark = pytest.mark.processes


def halved_mask(gradient: Tensor) -> Tensor:
    return (gradient * 0.5).where(gradient > 0, torch.zeros_like(gradient))


def clamped(parameter: nn.Parameter) -> None:
    assert parameter.grad is not None
    parameter.grad.clamp_(-0.01, 0.01)


def hooked(way: tuple[str, str]) -> list[float]:
    """Weights after two steps with hooks that return, return None, see and change gradients."""
    pair = beside(Chain, way)
    optimizers = [torch.optim.SGD(module.parameters(), lr=0.1) for module in pair.both]
    fully_shard_optimizer(optimizers[1])
    seen: list[float] = []
    head: Any = pair.model.module.head
    # Plain torch hooks what one process over both ranks' batches would see: the mean.
    head.weight.register_hook(halved_mask)
    head.weight.register_hook(lambda g: seen.append(float(gather_full(g).norm())))
    head.bias.register_post_accumulate_grad_hook(clamped)
    removed = head.weight.register_hook(lambda g: g * 100)
    removed.remove()
    errors = []
    for cycle in range(2):
        for module in pair.both:
            loss(module(own_batch(cycle))).backward()
        for parameter in pair.plain.parameters():
            parameter.grad = mean_over_ranks(parameter)
        plain: Any = pair.plain
        plain.head.weight.grad = halved_mask(plain.head.weight.grad)
        clamped(plain.head.bias)
        errors += [pair.worst_gradient(), abs(seen[-1] - float(plain.head.weight.grad.norm()))]
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        errors.append(pair.worst_weight())
    assert len(seen) == 2
    return errors


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


def hooked_sums(way: tuple[str, str]) -> tuple[str, float, str]:
    """What is said of a hook for single passes; the error of one for the sum; a wrong result."""
    pair = beside(Chain, way, sync_model_each_microbatch=False)
    handle = pair.model.module.head.weight.register_hook(lambda g: g)
    for _ in range(2):
        loss(pair.model(own_batch(1))).backward()
    said = refusal(pair.model.finish_grad_sync, LifecycleError)
    handle.remove()
    pair.zero_grad()
    pair.model.module.head.weight.register_post_accumulate_grad_hook(clamped)
    for microbatch in range(2):
        for module in pair.both:
            loss(module(own_batch(microbatch))).backward()
    pair.model.finish_grad_sync()
    plain: Any = pair.plain
    wanted = mean_over_ranks(plain.head.weight)
    assert wanted is not None
    found = gather_full(pair.model.module.head.weight.grad)
    error = distance(found, wanted.clamp(-0.01, 0.01))
    pair.zero_grad()
    pair.model.module.head.weight.register_hook(lambda _: torch.zeros(8, 8))
    loss(pair.model(own_batch(1))).backward()
    return said, error, refusal(pair.model.finish_grad_sync, LifecycleError)


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
def test_hooks_of_sharded_parameters_run_on_the_reduced_gradient(
    ranks: RankPool, way: tuple[str, str]
) -> None:
    for errors in ranks.run(hooked, way):
        assert max(errors) < 1e-12, errors


@pytest.mark.parametrize("way", WAYS, ids="-".join)
def test_hooks_of_before_sharding_run_on_the_gradient_of_the_rank(
    ranks: RankPool, way: tuple[str, str]
) -> None:
    assert max(ranks.run(hooked_before_sharding, way)) < 1e-12


@pytest.mark.parametrize("way", WAYS, ids="-".join)
def test_hooks_of_single_passes_are_refused_for_sums_and_for_other_shapes(
    ranks: RankPool, way: tuple[str, str]
) -> None:
    for said, error, wrong in ranks.run(hooked_sums, way):
        assert "summed up several" in said
        assert error < 1e-12
        assert "returned a Tensor; expected None or a DTensor of shape (8, 8)" in wrong


@pytest.mark.parametrize("way", WAYS, ids="-".join)
def test_scaling_keeps_what_clipping_did(ranks: RankPool, way: tuple[str, str]) -> None:
    for clipped_first, scaled_first in ranks.run(clipped_then_scaled, way):
        assert clipped_first == pytest.approx(0.5e-3, rel=0.02)
        assert scaled_first == pytest.approx(1e-3, rel=0.02)
