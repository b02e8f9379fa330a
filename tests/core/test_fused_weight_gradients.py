"""Layers whose backward writes the weight's gradient itself, as Transformer Engine's do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mfsdp_core import MixedPrecisionPolicy, fully_shard_model
from mfsdp_core.errors import LifecycleError
from oracle.cycles import gathered, named
from oracle.models import loss
from oracle.ranks import mesh
from oracle.reference import compare
from oracle.sharded import STRATEGIES
from oracle.transformer_engine import Linear

pytestmark = pytest.mark.on_ranks


class Fused(nn.Module):
    """A unit of two fused layers; `calls`: how often the first one runs in a pass."""

    def __init__(self, *, fuses: bool, calls: int = 1) -> None:
        super().__init__()
        options = {"params_dtype": torch.float64, "device": "cpu", "bias": False}
        self.first = Linear(8, 8, fuse_wgrad_accumulation=fuses, **options)
        self.second = Linear(8, 8, fuse_wgrad_accumulation=fuses, **options)
        self.calls, self.seen = calls, []

    def forward(self, x: Tensor) -> Tensor:
        self.seen = [self.first.weight, self.second.weight]  # with which kernels compute
        for _ in range(self.calls):
            x = self.first(x).tanh()
        return self.second(x)


class Tied(nn.Module):
    """The weight is an embedding's as well, which autograd differentiates."""

    def __init__(self, *, fuses: bool) -> None:
        super().__init__()
        self.body = Fused(fuses=fuses)
        self.embedding = nn.Embedding(8, 8, dtype=torch.float64)
        self.embedding.weight = self.body.second.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x + self.embedding(x.abs().long().sum(-1) % 8))


KINDS = {
    "two layers": Fused,
    "called twice": lambda *, fuses: Fused(fuses=fuses, calls=2),
    "tied": Tied,
}


def drawn(kind: str, *, fuses: bool) -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(KINDS[kind](fuses=fuses))


def batch(cycle: int) -> Tensor:
    return torch.arange(32, dtype=torch.float64).view(2, 2, 8) / 7 + cycle


class Silent(torch.autograd.Function):
    """Asks for the target, and neither says that it has written it nor returns a gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight = weight
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        ctx.weight.get_main_grad().copy_(gradient.t() @ x)
        return gradient @ ctx.weight, None


class SilentLinear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return Silent.apply(x, self.weight)


class Early(Silent):
    """Asks for the target in the forward pass, and says that it has written it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.target = weight.get_main_grad()
        return Silent.forward(ctx, x, weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        ctx.target.add_(gradient.t() @ x)
        ctx.weight.grad_added_to_main_grad = True
        return gradient @ ctx.weight, torch.empty_like(ctx.weight)


class EarlyLinear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return Early.apply(x, self.weight)


@pytest.mark.sample
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_that_layers_write_are_those_of_plain_layers(kind: str, strategy: str) -> None:
    """However often a layer runs in a pass, and whoever else has its weight.

    In one process, over two cycles of two microbatches. What layers write in a pass that asks for
    gradients of inputs alone does not count. No layer leaves `main_grad` on its parameter, which
    keeps the bucket's memory.
    """
    model: Any = fully_shard_model(
        drawn(kind, fuses=True),
        device_mesh=mesh(2)["dp"],
        zero_dp_strategy=strategy,
        fsdp_unit_modules=[Fused],
        sync_model_each_microbatch=False,
        mixed_precision_policy=MixedPrecisionPolicy(main_params_dtype=None),
    )
    rank = mesh(2).get_local_rank("dp")
    for cycle in range(2):
        plain = drawn(kind, fuses=False)
        for value in batch(cycle).view(4, 1, 8):
            (loss(plain(value.clone().requires_grad_())) / 2).backward()
        for number in range(2):
            value = batch(cycle)[rank, number : number + 1].requires_grad_()
            torch.autograd.grad(loss(model(value)), value)
            loss(model(value)).backward()
        model.finish_grad_sync()
        wanted = {n: p.grad for n, p in plain.named_parameters()}
        compare(gathered({n: p.grad for n, p in named(model)}), wanted)
        model.zero_grad_buffer()
    units = [unit for unit in model.modules() if isinstance(unit, Fused)]
    assert units
    assert not any(hasattr(raw, "main_grad") for unit in units for raw in unit.seen)


@pytest.mark.parametrize("strategy", ["no_shard", "optim_grads_params"])
def test_a_kernel_that_reports_nothing_is_refused(strategy: str) -> None:
    """Its gradient would be zeros, or none at all."""
    model = fully_shard_model(
        nn.Sequential(SilentLinear(8, 8, bias=False)),
        device_mesh=mesh(2)["dp"],
        zero_dp_strategy=strategy,
        fsdp_unit_modules=[SilentLinear],
    )
    with pytest.raises(LifecycleError, match="no gradient followed"):
        loss(model(torch.ones(2, 8, requires_grad=True))).backward()


@pytest.mark.parametrize(
    ("strategy", "between"),
    [
        *((strategy, "zero_grad") for strategy in STRATEGIES),
        ("optim_grads", "another pass"),
        ("optim_grads_params", "another pass"),
    ],
)
def test_memory_that_gradients_have_left_is_not_written(strategy: str, between: str) -> None:
    """The kernel asked for it in the forward pass, before they were cleared or reduced."""
    model = fully_shard_model(
        nn.Sequential(EarlyLinear(8, 8, bias=False)),
        device_mesh=mesh(2)["dp"],
        zero_dp_strategy=strategy,
        fsdp_unit_modules=[EarlyLinear],
        sync_model_each_microbatch=False,
    )
    first, second = (loss(model(torch.ones(2, 8, requires_grad=True))) for _ in range(2))
    if between == "zero_grad":
        model.zero_grad()
    else:
        first.backward()
    with pytest.raises(LifecycleError, match="no longer in use"):
        second.backward()
