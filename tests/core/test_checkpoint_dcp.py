"""torch.distributed.checkpoint as drop-in users call it, with no function of ours around it."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import DTensor

from mfsdp_core import fully_shard_optimizer
from mfsdp_core.errors import StateDictError
from mfsdp_core.shard.chunk import described_offsets
from oracle.checkpoints import Layout, TrainedToy, different, toy
from oracle.models import build
from oracle.ranks import RankPool

pytestmark = pytest.mark.processes

NAME = "conv_linear"
FLAT: Layout = (4, "optim_grads_params", "none")
HFSDP: Layout = (4, "optim_grads", "optim")
WHOLE: Layout = (4, "no_shard", "none")


def trained(layout: Layout, name: str = NAME) -> TrainedToy:
    source = toy(name, layout)
    source.train(2)
    return source


def saved_and_loaded(source_layout: Layout, target_layout: Layout, folder: str) -> list[str]:
    """Differences after `dcp.save` and `dcp.load` of state dicts, in torch's documented way."""
    source = trained(source_layout)
    state = {"model": source.model.state_dict(), "optimizer": source.optimizer.state_dict()}
    dcp.save(state, checkpoint_id=folder)
    target = toy(NAME, target_layout, seed=8)  # has never stepped
    state = {"model": target.model.state_dict(), "optimizer": target.optimizer.state_dict()}
    dcp.load(state, checkpoint_id=folder)
    target.model.load_state_dict(state["model"])
    target.optimizer.load_state_dict(state["optimizer"])
    bad = different(target.whole(), source.whole())
    return bad if torch.equal(target.output(), source.output()) else [*bad, "output"]


def stateful_objects(folder: str) -> list[str]:
    """The same with the model and the optimizer themselves as values."""
    source, target = trained(FLAT), toy(NAME, HFSDP, seed=8)
    dcp.save({"model": source.model, "optimizer": source.optimizer}, checkpoint_id=folder)
    dcp.load({"model": target.model, "optimizer": target.optimizer}, checkpoint_id=folder)
    return different(target.whole(), source.whole())


def saved_in_the_background(folder: str) -> list[str]:
    """`async_save`, which copies the state dicts before it writes them."""
    source, target = trained(FLAT), toy(NAME, HFSDP, seed=8)
    state = {"model": source.model.state_dict(), "optimizer": source.optimizer.state_dict()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, of its threads
        dcp.async_save(state, checkpoint_id=folder).result()
    dcp.load({"model": target.model, "optimizer": target.optimizer}, checkpoint_id=folder)
    return different(target.whole(), source.whole())


def through_torchs_state_dict_functions(folder: str) -> list[str]:
    """`get_state_dict` and `set_state_dict`, with an optimizer that has never stepped."""
    source, target = trained(FLAT), toy(NAME, HFSDP, seed=8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own
        model, optimizer = get_state_dict(source.model, source.optimizer)
        dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=folder)
        model, optimizer = get_state_dict(target.model, target.optimizer)
        state = {"model": model, "optimizer": optimizer}
        dcp.load(state, checkpoint_id=folder)
        set_state_dict(
            target.model,
            target.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
    return different(target.whole(), source.whole())


def straight_into_a_fresh_optimizer() -> list[str]:
    """`set_optimizer_state_dict` alone: state that differs, and weights that have moved."""
    source, target = trained(FLAT), toy(NAME, FLAT, seed=8)
    before = target.whole()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own
        state = get_optimizer_state_dict(source.model, source.optimizer)
        set_optimizer_state_dict(target.model, target.optimizer, state)
    states = {name: value for name, value in source.whole().items() if "/" in name}
    weights = {name: value for name, value in before.items() if "/" not in name}
    return different(target.whole(), weights | states)


class OfOthers(torch.optim.SGD):
    """An optimizer that nobody here knows."""


def an_unknown_optimizer(folder: str) -> str:
    """Plain `dcp.load` into an optimizer whose state nobody can make ahead."""
    models = [toy(NAME, FLAT) for _ in range(2)]
    source, target = (
        replace(
            one,
            optimizer=fully_shard_optimizer(OfOthers(one.model.parameters(), lr=0.1, momentum=0.9)),
        )
        for one in models
    )
    source.train(1)
    dcp.save({"optimizer": source.optimizer.state_dict()}, checkpoint_id=folder)
    with pytest.raises((StateDictError, RuntimeError, dcp.api.CheckpointException)) as error:
        dcp.load({"optimizer": target.optimizer}, checkpoint_id=folder)
    return str(error.value)


def read_by_one_process(layout: Layout, folder: str) -> list[str]:
    """What torch's own tools make of the files, without any of our code."""
    source = trained(layout)
    wanted = source.whole()
    dcp.save({"model": source.model.state_dict()}, checkpoint_id=folder)
    if dist.get_rank() > 0:
        return []
    plain = {f"module.{k}": torch.zeros_like(v) for k, v in build(NAME).state_dict().items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of loading in one process, which is the point
        dcp.load({"model": plain}, checkpoint_id=folder, no_dist=True)
    return [name for name, value in plain.items() if not torch.equal(value.flatten(), wanted[name])]


def offsets_on_one_rank() -> list[int]:
    """State dicts taken by one rank alone: a collective would never return."""
    source = trained(HFSDP)
    if dist.get_rank() != 1:
        return []
    shards = [v for v in source.model.state_dict().values() if isinstance(v, DTensor)]
    state = source.optimizer.state_dict()["state"]
    shards += [v for values in state.values() for v in values.values() if isinstance(v, DTensor)]
    return [len(shards), sum(described_offsets(shard) is None for shard in shards)]


def parts_of_the_model() -> list[str]:
    """Shards without a description in the state dicts of inner modules."""
    model: Any = trained(HFSDP).model
    dicts = [model.module.state_dict(), model.module.features.first.state_dict()]
    return [
        name
        for values in dicts
        for name, value in values.items()
        if isinstance(value, DTensor) and described_offsets(value) is None
    ]


@pytest.mark.parametrize(
    ("source", "target"), [(FLAT, HFSDP), (HFSDP, FLAT)], ids=["to-hfsdp", "from-hfsdp"]
)
def test_state_dicts_saved_and_loaded_by_torch_reshard(
    ranks: RankPool, source: Layout, target: Layout
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        assert ranks.run(saved_and_loaded, source, target, folder) == [[]] * 4


@pytest.mark.parametrize(
    "way", [stateful_objects, saved_in_the_background, through_torchs_state_dict_functions]
)
def test_torchs_other_ways_to_save_work(ranks: RankPool, way: Callable[[str], list[str]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        assert ranks.run(way, folder) == [[]] * 4


@pytest.mark.parametrize("layout", [FLAT, HFSDP])
def test_torch_reads_the_files_into_a_plain_module(ranks: RankPool, layout: Layout) -> None:
    with tempfile.TemporaryDirectory() as folder:
        assert ranks.run(read_by_one_process, layout, folder) == [[]] * 4


def test_describing_shards_takes_no_communication(ranks: RankPool) -> None:
    none, (shards, undescribed), *others = ranks.run(offsets_on_one_rank)
    assert (none, *others) == ([], [], [])
    assert shards == 24
    assert undescribed == 0


def test_state_dicts_of_inner_modules_are_described_as_well(ranks: RankPool) -> None:
    assert ranks.run(parts_of_the_model) == [[]] * 4


def test_torchs_function_sets_state_and_moves_no_weight(ranks: RankPool) -> None:
    assert ranks.run(straight_into_a_fresh_optimizer) == [[]] * 4


def test_dcp_cannot_pass_by_an_optimizer_without_places(ranks: RankPool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        assert all(ranks.run(an_unknown_optimizer, folder))
