"""Models on the meta device that cannot be given their weights are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import mfsdp_core
from conformance.judging import refuses, same
from mfsdp_core.errors import ConfigurationError

pytestmark = [pytest.mark.processes, pytest.mark.on_ranks(2)]


def _on_meta(module: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return module()


def _sharded(module: nn.Module, strategy: int, units: Any = (), **options: Any) -> Any:
    return mfsdp_core.fully_shard_model(
        module,
        fsdp_unit_modules=list(units) or None,
        zero_dp_strategy=strategy,
        init_model_with_meta_device=True,
        mixed_precision_policy=mfsdp_core.MixedPrecisionPolicy(None),
        **options,
    )


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
