"""Whole tensors through torch's own functions: `full_state_dict=True`, pickles and even shards."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)

from mfsdp_core import fully_shard_model, fully_shard_optimizer, gather_full
from mfsdp_core.errors import StateDictError
from oracle.beside_torch import refusal
from oracle.ranks import RankPool, mesh, on_two_axes
from oracle.sharded import STRATEGIES

pytestmark = pytest.mark.processes

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


def taken_whole(outer_strategy: int) -> bool:
    torch.manual_seed(0)
    model = fully_shard_model(
        nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3)),
        fsdp_unit_modules=[nn.Linear],
        **on_two_axes(outer_strategy),
    )
    found = get_model_state_dict(model, options=WHOLE)
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3)).state_dict()
    return alike(found, {f"module.{name}": value for name, value in plain.items()})


def step(model: Any, optimizer: Any, seed: int) -> None:
    torch.manual_seed(seed)
    model(torch.randn(4, 5)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def whole(model: Any) -> dict[str, torch.Tensor]:
    return {name: gather_full(p.detach()).clone() for name, p in model.named_parameters()}


def alike(found: dict[str, Any], wanted: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(found[name], value) for name, value in wanted.items())


def there_and_back(strategy: str, size: int) -> list[bool]:
    """Weights and moments taken whole, set whole, and the next step."""
    model, optimizer = built(strategy, size)
    step(model, optimizer, 1)
    weights, state = copy.deepcopy(get_state_dict(model, optimizer, options=WHOLE))
    moments = {n: gather_full(optimizer.state[p]["exp_avg"]) for n, p in model.named_parameters()}
    fresh, other = built(strategy, size)
    set_state_dict(
        fresh, other, model_state_dict=dict(weights), optim_state_dict=state, options=WHOLE
    )
    right = [
        alike(weights, whole(model)),
        alike({name: one["exp_avg"] for name, one in state["state"].items()}, moments),
        alike(whole(fresh), whole(model)),
    ]
    step(model, optimizer, 2)
    step(fresh, other, 2)
    return [*right, alike(whole(fresh), whole(model))]


def written_by_torch() -> list[str]:
    """What is said of a model's own parameters, as they are and as torch's broadcast leaves them.

    A single row of its own fits any rows of ours, and is written to all.
    """
    model, _ = built("optim_grads_params", 2, 3, 2)
    own = dict(model.named_parameters())
    said = [refusal(lambda: model.load_state_dict(own), StateDictError)]
    with torch.no_grad():
        for parameter in own.values():
            parameter.to_local().copy_(torch.ones(1))
    return [*said, refusal(lambda: model.load_state_dict(own), StateDictError)]


@pytest.mark.sample
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_whole_state_is_taken_and_set(ranks: RankPool, strategy: str, size: int) -> None:
    assert ranks.run(there_and_back, strategy, size) == [[True] * 4] * 4


@pytest.mark.parametrize("outer_strategy", [0, 1])
def test_whole_state_is_taken_from_two_axes(ranks: RankPool, outer_strategy: int) -> None:
    assert all(ranks.run(taken_whole, outer_strategy))


def test_rows_that_torch_writes_elsewhere_are_refused(ranks: RankPool) -> None:
    befores, afters = zip(*ranks.run(written_by_torch), strict=True)
    assert not any(befores)
    assert any("weights are wrong now" in after for after in afters)  # where rows were written
