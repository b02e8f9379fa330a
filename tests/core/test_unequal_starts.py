"""Models that cannot be what was meant: ranks with other weights, and units that nobody named."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

from mfsdp_core import fully_shard_model
from oracle.models import Block, Chain
from oracle.ranks import mesh, on_two_axes

pytestmark = pytest.mark.on_ranks


def said(change: Any, **arguments: Any) -> list[str]:
    """Warnings of sharding a model that `change` has changed."""
    torch.manual_seed(3)
    module = Chain()
    with torch.no_grad():
        change(module)
    arguments.setdefault("device_mesh", mesh(2)["dp"] if "dp_outer_dim" not in arguments else None)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fully_shard_model(module, **{"fsdp_unit_modules": [Block], **arguments})
    return [str(one.message) for one in caught]


@pytest.mark.parametrize("strategy", ["no_shard", "optim_grads_params"])
def test_unequal_weights_are_said_on_every_rank(strategy: str) -> None:
    """Where one element of one weight differs on the second rank."""
    second = mesh(2).get_local_rank("dp") == 1

    def change(module: nn.Module) -> None:
        module.get_parameter("head.bias")[3] += 1e-6 * second

    assert said(lambda _: None, zero_dp_strategy=strategy) == []
    (warning,) = said(change, zero_dp_strategy=strategy)
    assert "1 of 17 parameters have other values on other ranks" in warning
    assert "the first is head.bias" in warning


def test_unequal_weights_are_said_along_the_outer_axis() -> None:
    where = on_two_axes()
    outer = where["device_mesh"].get_local_rank("outer")
    (warning,) = said(lambda module: module.get_parameter("head.bias").add_(outer), **where)
    assert "the first is head.bias" in warning


def test_an_empty_list_of_units_is_said() -> None:
    (warning,) = said(lambda _: None, fsdp_unit_modules=[])
    assert "fsdp_unit_modules is empty" in warning
    assert said(lambda _: None, fsdp_unit_modules=None) == []
