"""Whole tensors through torch's own functions: `full_state_dict=True`, pickles and even shards."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)

from conformance.judging import same
from mfsdp_core import fully_shard_model, fully_shard_optimizer, gather_full
from mfsdp_core.errors import StateDictError
from oracle.ranks import mesh, on_two_axes
from oracle.sharded import STRATEGIES

pytestmark = pytest.mark.on_ranks

WHOLE = StateDictOptions(full_state_dict=True)


def built(strategy: str, size: int, *widths: int) -> tuple[Any, Any]:
    torch.manual_seed(0)
    wide, narrow = widths or (7, 3)
    model = fully_shard_model(
        nn.Sequential(nn.Linear(5, wide), nn.Linear(wide, narrow)),
        device_mesh=mesh(size)["dp"],
        fsdp_unit_modules=[nn.Linear],
        zero_dp_strategy=strategy,
    )
    return model, fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=0.1))


def step(model: Any, optimizer: Any, seed: int) -> None:
    torch.manual_seed(seed)
    model(torch.randn(4, 5)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def whole(model: Any) -> dict[str, torch.Tensor]:
    return {name: gather_full(p.detach()).clone() for name, p in model.named_parameters()}


def compare(found: Any, wanted: dict[str, torch.Tensor]) -> None:
    for name, value in wanted.items():
        same(name, found[name], value)


@pytest.mark.sample
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_whole_state_is_taken_and_set(strategy: str, size: int) -> None:
    """Weights and moments, and the next step."""
    model, optimizer = built(strategy, size)
    step(model, optimizer, 1)
    weights, state = copy.deepcopy(get_state_dict(model, optimizer, options=WHOLE))
    moments = {n: gather_full(optimizer.state[p]["exp_avg"]) for n, p in model.named_parameters()}
    fresh, other = built(strategy, size)
    set_state_dict(
        fresh, other, model_state_dict=dict(weights), optim_state_dict=state, options=WHOLE
    )
    compare(weights, whole(model))
    compare({name: one["exp_avg"] for name, one in state["state"].items()}, moments)
    compare(whole(fresh), whole(model))
    step(model, optimizer, 2)
    step(fresh, other, 2)
    compare(whole(fresh), whole(model))


@pytest.mark.parametrize("outer_strategy", [0, 1])
def test_whole_state_is_taken_from_two_axes(outer_strategy: int) -> None:
    plain = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
    model = fully_shard_model(
        copy.deepcopy(plain), fsdp_unit_modules=[nn.Linear], **on_two_axes(outer_strategy)
    )
    found = get_model_state_dict(model, options=WHOLE)
    compare(found, {f"module.{name}": value for name, value in plain.state_dict().items()})


def test_rows_that_torch_writes_elsewhere_are_refused() -> None:
    """Into a model's own parameters, as torch's broadcast leaves them.

    A single row of its own fits any rows of ours, and is written to all.
    """
    model, _ = built("optim_grads_params", 2, 3, 2)
    own = dict(model.named_parameters())
    model.load_state_dict(own)
    with torch.no_grad():
        for parameter in own.values():
            parameter.to_local().copy_(torch.ones(1))
    said = ""
    try:
        model.load_state_dict(own)
    except StateDictError as error:
        said = str(error)
    both = [said, said]
    dist.all_gather_object(both, said, group=mesh(2).get_group("dp"))
    assert any("weights are wrong now" in one for one in both), both  # where rows were written
