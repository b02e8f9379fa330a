"""Models that cannot be what was meant: ranks with other weights, and units that nobody named."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

from mfsdp_core import fully_shard_model
from oracle.models import Block, Chain
from oracle.ranks import RankPool, mesh, on_two_axes

pytestmark = pytest.mark.processes


def said(change: Any, **arguments: Any) -> list[str]:
    """Warnings of sharding a model that `change` has changed."""
    torch.manual_seed(3)
    module = Chain()
    with torch.no_grad():
        change(module)
    arguments.setdefault("device_mesh", mesh(2)["dp"] if "dp_outer_dim" not in arguments else None)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fully_shard_model(module, fsdp_unit_modules=[Block], **arguments)
    return [str(one.message) for one in caught]


def unlike(strategy: str) -> list[list[str]]:
    """With equal weights, and with one element of one weight that differs on the second rank."""
    second = mesh(2).get_local_rank("dp") == 1

    def change(module: nn.Module) -> None:
        module.get_parameter("head.bias")[3] += 1e-6 * second

    return [
        said(lambda _: None, zero_dp_strategy=strategy),
        said(change, zero_dp_strategy=strategy),
    ]


def unlike_on_two_axes() -> list[str]:
    where = on_two_axes()
    outer = where["device_mesh"].get_local_rank("outer")
    return said(
        lambda module: module.get_parameter("head.bias").add_(outer),
        **where,
    )


def without_units() -> list[list[str]]:
    found = []
    for units in ([], None):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.manual_seed(3)
            fully_shard_model(Chain(), device_mesh=mesh(2)["dp"], fsdp_unit_modules=units)
        found.append([str(one.message) for one in caught])
    return found


@pytest.mark.parametrize("strategy", ["no_shard", "optim_grads_params"])
def test_unequal_weights_are_said_on_every_rank(ranks: RankPool, strategy: str) -> None:
    for alike, other in ranks.run(unlike, strategy):
        assert alike == []
        assert len(other) == 1
        assert "1 of 17 parameters have other values on other ranks" in other[0]
        assert "the first is head.bias" in other[0]


def test_unequal_weights_are_said_along_the_outer_axis(ranks: RankPool) -> None:
    for (warning,) in ranks.run(unlike_on_two_axes):
        assert "the first is head.bias" in warning


def test_an_empty_list_of_units_is_said(ranks: RankPool) -> None:
    for empty, none in ranks.run(without_units):
        assert len(empty) == 1
        assert "fsdp_unit_modules is empty" in empty[0]
        assert none == []
