"""Optimizer state in torch's own ways, into an optimizer that has never stepped.

`test_checkpoint_dcp.py` has the state dicts of torch.distributed.checkpoint.
"""

from __future__ import annotations

import dataclasses
import io
import tempfile
import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from mfsdp_core import fully_shard_optimizer
from mfsdp_core.errors import StateDictError
from oracle.checkpoints import Layout, TrainedToy, different, toy
from oracle.ranks import RankPool

pytestmark = pytest.mark.processes

NAME = "linear_stack"
SHARDED: Layout = (4, "optim_grads_params", "none")
LAYOUTS: list[Layout] = [SHARDED, (2, "optim", "none"), (4, "no_shard", "none")]


class OfOthers(torch.optim.SGD):
    """An optimizer that nobody here knows."""


def of_others(one: TrainedToy) -> TrainedToy:
    """`one` with such an optimizer."""
    made_for_it = OfOthers(one.model.parameters(), lr=0.1, momentum=0.9)
    return dataclasses.replace(one, optimizer=fully_shard_optimizer(made_for_it))


def through_a_file_per_rank(layout: Layout) -> list[str]:
    """`torch.save` and `torch.load` of state dicts, each rank its own."""
    source, target = toy(NAME, layout), toy(NAME, layout, seed=8)
    source.train(2)
    file = io.BytesIO()
    torch.save((source.model.state_dict(), source.optimizer.state_dict()), file)
    file.seek(0)
    model, optimizer = torch.load(file)
    target.model.load_state_dict(model)
    target.optimizer.load_state_dict(optimizer)
    bad = different(target.whole(), source.whole())
    source.train(1)
    target.train(1)
    return [*bad, *different(target.whole(), source.whole())]


def through_torchs_optimizer_functions(folder: str) -> list[str]:
    """`get_optimizer_state_dict`, plain `dcp` and `set_optimizer_state_dict`."""
    source, target = toy(NAME, SHARDED), toy(NAME, SHARDED, seed=8)
    source.train(2)
    before = target.whole()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own
        saved = get_optimizer_state_dict(source.model, source.optimizer)
        dcp.save({"optimizer": saved}, checkpoint_id=folder)
        holder = {"optimizer": get_optimizer_state_dict(target.model, target.optimizer)}
        dcp.load(holder, checkpoint_id=folder)
        set_optimizer_state_dict(target.model, target.optimizer, holder["optimizer"])
    return lost_or_moved(before, target.whole(), source.whole())


def straight_into_a_fresh_optimizer() -> list[str]:
    """`set_optimizer_state_dict` alone, without asking the target for anything before."""
    source, target = toy(NAME, SHARDED), toy(NAME, SHARDED, seed=8)
    source.train(2)
    before = target.whole()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own
        state = get_optimizer_state_dict(source.model, source.optimizer)
        set_optimizer_state_dict(target.model, target.optimizer, state)
    return lost_or_moved(before, target.whole(), source.whole())


def lost_or_moved(
    before: dict[str, torch.Tensor], found: dict[str, torch.Tensor], saved: dict[str, torch.Tensor]
) -> list[str]:
    """Weights of a fresh target that have changed, and state that differs from what was saved."""
    moved = [name for name in before if not torch.equal(before[name], found[name])]
    states = [name for name in saved if "/" in name]
    return moved + [name for name in states if not torch.equal(found[name], saved[name])]


def an_unknown_optimizer_and_dcp(folder: str) -> str:
    """Plain `dcp.load` into an optimizer whose state nobody can make ahead."""
    source, target = of_others(toy(NAME, SHARDED)), of_others(toy(NAME, SHARDED))
    source.train(1)
    dcp.save({"optimizer": source.optimizer.state_dict()}, checkpoint_id=folder)
    with pytest.raises((StateDictError, RuntimeError, dcp.api.CheckpointException)) as error:
        dcp.load({"optimizer": target.optimizer}, checkpoint_id=folder)
    return str(error.value)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout[1])
def test_what_torch_load_returns_arrives(ranks: RankPool, layout: Layout) -> None:
    assert ranks.run(through_a_file_per_rank, layout) == [[]] * 4


def test_torchs_function_sets_state_and_moves_no_weight(ranks: RankPool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        assert ranks.run(through_torchs_optimizer_functions, folder) == [[]] * 4
    assert ranks.run(straight_into_a_fresh_optimizer) == [[]] * 4


def test_dcp_cannot_pass_by_an_optimizer_without_places(ranks: RankPool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        assert all(ranks.run(an_unknown_optimizer_and_dcp, folder))
