"""Models built on the meta device get the weights that they would have had without it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mfsdp_core
from conformance.judging import refuses, same
from mfsdp_core.errors import ConfigurationError

pytestmark = [pytest.mark.processes, pytest.mark.on_ranks(2)]

_WIDTH = 6


class _Layer(nn.Module):
    """Draws in its own reset, behind its children; has statistics and a buffer that is real."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(_WIDTH, 2)
        self.norm = nn.BatchNorm1d(_WIDTH)
        self.gain = nn.Parameter(torch.empty(_WIDTH))
        self.register_buffer("nothing", None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """The gain alone."""
        nn.init.normal_(self.gain)

    def forward(self, x: Tensor) -> Tensor:
        """[rows, width] to the same."""
        x = x + self.attention(x, x, x, need_weights=False)[0]
        out: Tensor = self.norm(x) * self.gain
        return out


class _Model(nn.Module):
    """Tied ends, frozen and marked parameters, buffers that are shared and real."""

    positions: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Embedding(7, _WIDTH)
        self.layers: Any = nn.ModuleList([_Layer(), _Layer()])
        self.last = nn.Linear(_WIDTH, 7, bias=False)
        self.rest = nn.Linear(_WIDTH, _WIDTH)
        self.register_buffer("positions", torch.empty(_WIDTH))
        self.real = nn.Parameter(torch.full((3,), 2.0, device="cpu"))
        self.reset_parameters()
        self.last.weight = self.first.weight
        self.rest.register_buffer("positions", self.positions)
        self.layers[1].gain.requires_grad_(False)
        self.layers[0].gain.marked = "kept"

    def reset_parameters(self) -> None:
        """The buffer."""
        with torch.no_grad():
            self.positions.copy_(torch.arange(_WIDTH))

    def forward(self, tokens: Tensor) -> Tensor:
        """Outputs of the last layer."""
        x = self.first(tokens) + self.positions
        for layer in self.layers:
            x = layer(x)
        out: Tensor = self.last(self.rest(x) + self.real.sum())
        return out


def _on_meta(module: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return module()


def _sharded(module: nn.Module, strategy: int, units: Any = (_Layer,), **options: Any) -> Any:
    return mfsdp_core.fully_shard_model(
        module,
        fsdp_unit_modules=list(units) or None,
        zero_dp_strategy=strategy,
        init_model_with_meta_device=True,
        mixed_precision_policy=mfsdp_core.MixedPrecisionPolicy(None),
        **options,
    )


def test_weights_are_drawn_as_without_it() -> None:
    """Of every strategy that shards: weights, buffers, ties, marks, statistics and outputs."""
    tokens = torch.arange(5)
    for strategy in (1, 2, 3):
        torch.manual_seed(3)
        wanted = _Model()
        module = _on_meta(_Model)
        torch.manual_seed(3)
        model = _sharded(module, strategy)
        named = dict(model.module.named_parameters())
        same("names", list(named), list(dict(wanted.named_parameters())))
        for name, p in wanted.named_parameters():
            same(name, mfsdp_core.gather_full(named[name].detach()), p.detach())
            same(f"{name} trains", named[name].requires_grad, p.requires_grad)
        buffers = dict(model.module.named_buffers())
        for name, buffer in wanted.named_buffers():
            same(name, buffers[name], buffer)
        same("a shared buffer", model.module.rest.positions is model.module.positions, True)
        same("a tie", model.module.last.weight is model.module.first.weight, True)
        same("a mark", model.module.layers[0].gain.marked, "kept")
        model.eval()
        wanted.eval()
        with torch.no_grad():
            same("outputs", model(tokens), wanted(tokens))


class _Helpless(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))


class _Private(nn.Module):
    """Has the other name of the method."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(3, 2))

    def _reset_parameters(self) -> None:
        nn.init.constant_(self.weight, 4.0)


def test_what_cannot_be_made_is_refused() -> None:
    """The root alone, and many modules without a reset; the other name of the method is found."""
    root = _on_meta(lambda: nn.Linear(4, 4))
    refuses(ConfigurationError, "(root) have tensors", lambda: mfsdp_core.fully_shard_model(root))
    many = _on_meta(lambda: nn.ModuleList(_Helpless() for _ in range(10)))
    refuses(ConfigurationError, "and 2 more have neither", lambda: _sharded(many, 3, ()))
    model = _sharded(_on_meta(_Private), 3, ())
    (weight,) = model.parameters()
    same("by its own", mfsdp_core.gather_full(weight.detach()), torch.full((3, 2), 4.0))
