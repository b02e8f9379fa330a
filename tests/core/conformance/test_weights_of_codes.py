"""Layers and optimizer of Transformer Engine, by their stand-ins, against plain torch."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import mfsdp_core
from bench.testing.fused_adam import FusedAdam
from bench.testing.quantised import quantised
from conformance.judging import close, refuses, same
from mfsdp_core.errors import ConfigurationError
from mfsdp_core.precision.transformer_engine import initial_values
from oracle import transformer_engine as te

pytestmark = [pytest.mark.processes, pytest.mark.on_ranks(4)]

_RECIPES: dict[str, Any] = {
    "current": te.Float8CurrentScaling,
    "block": te.Float8BlockScaling,
    "mxfp8": te.MXFP8BlockScaling,
}
_WIDTH, _RATE, _STEPS = 32, 0.5, 2
_Layer = Callable[..., nn.Module]


class _Unit(nn.Module):
    """Four ranks cut blocks of 128 rows and of 32, and some hold nothing of `few`."""

    def __init__(self, layer: _Layer) -> None:
        super().__init__()
        self.up, self.down = layer(_WIDTH, 144), layer(144, _WIDTH)
        self.few = layer(_WIDTH, 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.down(self.up(x).tanh()) * self.few(x).sum(-1, keepdim=True)
        out: Tensor = x + y
        return out


class _Few(nn.Module):
    """A unit of which most ranks hold nothing, called twice."""

    def __init__(self, layer: _Layer) -> None:
        super().__init__()
        self.few = layer(_WIDTH, 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = x * (1 + self.few(x).sum(-1, keepdim=True))
        return x


class _OfOneProcess(nn.Module):
    """A layer that computes with the decoded whole of FP32 weights."""

    def __init__(self, recipe: str, rows: int, columns: int, bias: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(columns, rows).normal_(0.0, 0.023))
        self.bias = nn.Parameter(torch.zeros(columns)) if bias else None
        self.recipe = recipe

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight.detach()
        both = [quantised(self.recipe, weight, weight.dtype, backward=b) for b in (False, True)]
        out: Tensor = _Product.apply(x, self.weight, *both)
        return out if self.bias is None else out + self.bias


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
        del weight
        ctx.save_for_backward(x, columns)
        return x @ rows.t()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, columns = ctx.saved_tensors
        of_weight = gradient.flatten(0, -2).t() @ x.flatten(0, -2)
        return gradient @ columns, of_weight, None, None


def _drawn(layer: _Layer) -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(_Unit(layer), _Few(layer), _Unit(layer))


@contextmanager
def _primary(recipe: str, strategy: int, **options: Any) -> Iterator[Any]:
    """A sharded model whose weights are codes, whose layers write their gradients."""

    def layer(rows: int, columns: int, **more: Any) -> nn.Module:
        given = {"params_dtype": torch.float32, "device": "cpu", **more}
        return te.Linear(rows, columns, fuse_wgrad_accumulation=True, **given)

    with te.installed():
        with te.quantized_model_init(True, _RECIPES[recipe](), True):
            module = _drawn(layer)
        yield mfsdp_core.fully_shard_model(
            module, fsdp_unit_modules=[_Unit, _Few], zero_dp_strategy=strategy, **options
        )


def _batch(step: int, rank: int) -> Tensor:
    return torch.randn(4, _WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))


def _whole(model: Any) -> dict[str, Tensor]:
    named = model.module.named_parameters()
    return {name: mfsdp_core.gather_full(p.detach()) for name, p in named}


def test_weights_kept_as_codes_train_as_in_one_process() -> None:
    """Every recipe, and of MXFP8 several strategies: losses, and main weights after two steps."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    for recipe in _RECIPES:
        plain = _drawn(lambda *shape, r=recipe, **more: _OfOneProcess(r, *shape, **more))
        reference = torch.optim.SGD(plain.parameters(), lr=_RATE)
        losses = []
        for step in range(_STEPS):
            of_all = plain(torch.cat([_batch(step, other) for other in range(ranks)])).square()
            of_all.mean().backward()
            losses.append(of_all.detach().chunk(ranks)[rank].mean())
            reference.step()
            reference.zero_grad()
        for strategy in (0, 2, 3) if recipe == "mxfp8" else (3,):
            with _primary(recipe, strategy) as model:
                inner = torch.optim.SGD(model.parameters(), lr=_RATE)
                optimizer = mfsdp_core.fully_shard_optimizer(inner)
                for step in range(_STEPS):
                    loss = model(_batch(step, rank)).square().mean()
                    loss.backward()
                    close(f"loss of {recipe}, {strategy}", loss.detach(), losses[step], 1e-5)
                    optimizer.step()
                    optimizer.zero_grad()
                found = _whole(model)
            for name, wanted in plain.named_parameters():
                close(f"{name} of {recipe}, {strategy}", found[name], wanted.detach(), 1e-4)


def test_a_gather_sends_a_byte_per_weight() -> None:
    """In both passes; of MXFP8 rows and then columns. Nothing is left of a unit behind them."""
    for recipe in ("current", "mxfp8"):
        with _primary(recipe, 3) as model:
            weights: list[Any] = []
            unit = model.module[0]
            unit.register_forward_hook(lambda m, *_, into=weights: into.append(m.up.weight))
            model(_batch(0, 0)).square().mean().backward()
            sent = sum(r.payload_bytes for r in model.wire_log if r.dtype == "uint8")
            elements = 2 * (2 * _WIDTH * 144 + 2 * _WIDTH)
            assert 2 * elements <= sent < 2.3 * elements, f"{recipe}: {sent} B of {elements}"
            names = ("_data", "_transpose", "_rowwise_data", "_columnwise_data")
            kept = [getattr(weights[0], name, None) for name in names]
            held = [t.untyped_storage().nbytes() for t in kept if t is not None]
            same(f"codes of {recipe} that are left", sum(held), 0)
            booked = model.ledger.bytes_by_category()["communication_buffers"]
            same(f"bytes of {recipe} that are left", booked, 0)


def test_its_optimizer_steps_on_shards() -> None:
    """FusedAdam as AdamW; one that looks for gradients elsewhere is refused."""
    with _primary("block", 3, use_decoupled_grad=True) as model:
        plain = [mfsdp_core.gather_full(p.detach()).requires_grad_() for p in model.parameters()]
        options: dict[str, Any] = {"lr": 0.01, "weight_decay": 0.1}
        reference = torch.optim.AdamW(plain, **options)
        own = FusedAdam(model.parameters(), use_decoupled_grad=True, **options)
        optimizer = mfsdp_core.fully_shard_optimizer(own)
        optimizer.zero_grad(set_to_none=False)
        model(_batch(0, 0)).square().mean().backward()
        model.finish_grad_sync()
        for p, whole in zip(model.parameters(), plain, strict=True):
            whole.grad = mfsdp_core.gather_full(p.decoupled_grad)
        optimizer.step()
        reference.step()
        for p, whole in zip(model.parameters(), plain, strict=True):
            close("a weight", mfsdp_core.gather_full(p.detach()), whole.detach(), 1e-5)
        optimizer.zero_grad(set_to_none=False)
        for p in model.parameters():
            same("zeros", float(mfsdp_core.gather_full(p.decoupled_grad).abs().sum()), 0.0)
        other = FusedAdam(model.parameters())
        refuses(
            ConfigurationError,
            "nothing would be trained",
            lambda: mfsdp_core.fully_shard_optimizer(other),
        )


def test_main_weights_begin_with_what_was_drawn() -> None:
    """In FP32; with the decoded codes, and a warning, where the drawn values were not kept."""
    for preserves in (True, False):
        torch.manual_seed(3)
        with te.installed(), te.quantized_model_init(True, te.Float8CurrentScaling(), preserves):
            weight: Any = te.Linear(_WIDTH, 16, params_dtype=torch.float32, device="cpu").weight
        wanted = weight.dequantize(dtype=torch.float32)
        if preserves:
            wanted = weight.get_high_precision_init_val().clone()
            del weight.clear_high_precision_init_val
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            same("main weights", initial_values("w", weight), wanted)
        same(
            "warned",
            ["of w begin with decoded" in str(w.message) for w in said],
            [True] * (not preserves),
        )
