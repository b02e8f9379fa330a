"""Optimizer state in torch's own ways, into an optimizer that has never stepped.

`test_checkpoint_dcp.py` has the state dicts of torch.distributed.checkpoint.
"""

from __future__ import annotations

import dataclasses
import io
import tempfile
import warnings
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor

from mfsdp_core import fully_shard, fully_shard_optimizer
from mfsdp_core.errors import StateDictError
from oracle.checkpoints import Layout, TrainedToy, different, toy
from oracle.models import TOYS, batch, build, loss
from oracle.ranks import RankPool, mesh

pytestmark = pytest.mark.processes

NAME = "linear_stack"
SHARDED: Layout = (4, "optim_grads_params", "none")
LAYOUTS: list[Layout] = [SHARDED, (2, "optim", "none"), (4, "no_shard", "none")]
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "ASGD": {},
    "Adadelta": {},
    "Adagrad": {"initial_accumulator_value": 0.1},
    "Adam": {"amsgrad": True},
    "AdamW": {"fused": True},
    "Adamax": {},
    "NAdam": {},
    "RAdam": {},
    "RMSprop": {"momentum": 0.9, "centered": True},
    "Rprop": {},
    "SGD": {"momentum": 0.9, "nesterov": True},
}


class OfOthers(torch.optim.SGD):
    """An optimizer that nobody here knows."""


def of_others(one: TrainedToy) -> TrainedToy:
    """`one` with such an optimizer."""
    made_for_it = OfOthers(one.model.parameters(), lr=0.1, momentum=0.9)
    return dataclasses.replace(one, optimizer=fully_shard_optimizer(made_for_it))


def made(name: str, parameters: Any) -> torch.optim.Optimizer:
    return getattr(torch.optim, name)(parameters, lr=0.05, **OPTIMIZERS[name])


def weights_after_a_step(model: Any, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    loss(model(batch(NAME, 0, 0, torch.float32))).backward()
    optimizer.step()
    optimizer.zero_grad()
    return [p.detach().to_local().clone() for p in model.parameters()]


def offered_state(name: str) -> list[str]:
    """A state dict taken before the first step changes nothing that follows.

    Also built from the module's own parameters, which Adagrad has state of at once.
    """
    bad = []
    runs = []
    for asks in (False, True):
        module = build(NAME)
        model, optimizer = fully_shard(
            module,
            made(name, module.parameters()),
            device_mesh=mesh(4),
            dp_shard_dim="dp",
            fsdp_unit_modules=list(TOYS[NAME].units),
        )
        before = [p.detach().to_local().clone() for p in model.parameters()]
        if asks:
            state = optimizer.state_dict()["state"]
            shards = [v for s in state.values() for v in s.values() if isinstance(v, DTensor)]
            if len(state) != len(before) or not shards:
                bad.append(f"{len(state)} states, {len(shards)} shards")
            after = [p.detach().to_local() for p in model.parameters()]
            if not all(map(torch.equal, before, after)):
                bad.append("weights")
            if any(p.grad is not None for p in model.parameters()):
                bad.append("gradients")
        weights_after_a_step(model, optimizer)
        runs.append(weights_after_a_step(model, optimizer))
    return bad if all(map(torch.equal, *runs)) else [*bad, "training"]


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


def refusals() -> list[str]:
    """What must not go by in silence, each with what is said."""
    said = []
    source = toy(NAME, SHARDED)
    source.train(1)
    state = source.optimizer.state_dict()
    target = toy(NAME, (2, "optim_grads_params", "none"))
    before = target.optimizer.state_dict()["state"]
    for change in (
        lambda value: value,  # shards of another number of ranks
        lambda value: value.to_local() if isinstance(value, DTensor) else value,
    ):
        values = {
            number: {k: change(v) for k, v in values.items()}
            for number, values in state["state"].items()
        }
        with pytest.raises(StateDictError) as error:
            target.optimizer.load_state_dict({**state, "state": values})
        said.append(str(error.value))
    assert all(float(values["step"]) == 0 for values in before.values())
    kept = of_others(toy(NAME, SHARDED))
    unknown = kept.optimizer
    places = unknown.state_dict()
    file = io.BytesIO()
    torch.save(places, file)
    file.seek(0)
    assert torch.load(file)["state"] == {}
    with pytest.raises(StateDictError) as error:
        unknown.load_state_dict(places)
    return [*said, str(error.value)]


def an_unknown_optimizer_and_dcp(folder: str) -> str:
    """Plain `dcp.load` into an optimizer whose state nobody can make ahead."""
    source, target = of_others(toy(NAME, SHARDED)), of_others(toy(NAME, SHARDED))
    source.train(1)
    dcp.save({"optimizer": source.optimizer.state_dict()}, checkpoint_id=folder)
    with pytest.raises((StateDictError, RuntimeError, dcp.api.CheckpointException)) as error:
        dcp.load({"optimizer": target.optimizer}, checkpoint_id=folder)
    return str(error.value)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_state_dict_before_the_first_step_has_places_and_changes_nothing(
    ranks: RankPool, name: str
) -> None:
    assert ranks.run(offered_state, name) == [[]] * 4


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout[1])
def test_what_torch_load_returns_arrives(ranks: RankPool, layout: Layout) -> None:
    assert ranks.run(through_a_file_per_rank, layout) == [[]] * 4


def test_torchs_function_sets_state_and_moves_no_weight(ranks: RankPool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        assert ranks.run(through_torchs_optimizer_functions, folder) == [[]] * 4
    assert ranks.run(straight_into_a_fresh_optimizer) == [[]] * 4


def test_state_that_does_not_fit_is_refused(ranks: RankPool) -> None:
    for others, local, unknown in ranks.run(refusals):
        assert "save_checkpoint" in others
        assert "found a tensor of shape" in local
        assert "OfOthers" in unknown


def test_dcp_cannot_pass_by_an_optimizer_without_places(ranks: RankPool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        assert all(ranks.run(an_unknown_optimizer_and_dcp, folder))
