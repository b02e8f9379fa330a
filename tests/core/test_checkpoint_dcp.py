"""torch.distributed.checkpoint as drop-in users call it, with no function of ours around it."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path
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

from conformance.judging import same
from mfsdp_core import fully_shard_optimizer
from mfsdp_core.errors import StateDictError
from mfsdp_core.shard.chunk import described_offsets
from oracle.checkpoints import Layout, TrainedToy, different, toy
from oracle.models import build

pytestmark = pytest.mark.on_ranks

NAME = "conv_linear"
FLAT: Layout = (4, "optim_grads_params", "none")
HFSDP: Layout = (4, "optim_grads", "optim")


def trained(layout: Layout, name: str = NAME) -> TrainedToy:
    source = toy(name, layout)
    source.train(2)
    return source


def same_toys(found: TrainedToy, wanted: TrainedToy) -> None:
    assert different(found.whole(), wanted.whole()) == []


@pytest.mark.parametrize(
    ("source_layout", "target_layout"),
    [(FLAT, HFSDP), (HFSDP, FLAT)],
    ids=["to-hfsdp", "from-hfsdp"],
)
def test_state_dicts_saved_and_loaded_by_torch_reshard(
    source_layout: Layout, target_layout: Layout, tmp_path: Path
) -> None:
    """In torch's documented way."""
    source = trained(source_layout)
    state = {"model": source.model.state_dict(), "optimizer": source.optimizer.state_dict()}
    dcp.save(state, checkpoint_id=tmp_path)
    target = toy(NAME, target_layout, seed=8)  # has never stepped
    state = {"model": target.model.state_dict(), "optimizer": target.optimizer.state_dict()}
    dcp.load(state, checkpoint_id=tmp_path)
    target.model.load_state_dict(state["model"])
    target.optimizer.load_state_dict(state["optimizer"])
    same_toys(target, source)
    same("output", target.output(), source.output())


def test_torch_saves_models_and_optimizers_themselves(tmp_path: Path) -> None:
    source, target = trained(FLAT), toy(NAME, HFSDP, seed=8)
    dcp.save({"model": source.model, "optimizer": source.optimizer}, checkpoint_id=tmp_path)
    dcp.load({"model": target.model, "optimizer": target.optimizer}, checkpoint_id=tmp_path)
    same_toys(target, source)


def test_torch_saves_in_the_background(tmp_path: Path) -> None:
    """`async_save` copies the state dicts before it writes them."""
    source, target = trained(FLAT), toy(NAME, HFSDP, seed=8)
    state = {"model": source.model.state_dict(), "optimizer": source.optimizer.state_dict()}
    warnings.simplefilter("ignore")  # torch's own, of its threads
    dcp.async_save(state, checkpoint_id=tmp_path).result()
    dcp.load({"model": target.model, "optimizer": target.optimizer}, checkpoint_id=tmp_path)
    same_toys(target, source)


def test_torchs_state_dict_functions_reach_an_optimizer_that_has_never_stepped(
    tmp_path: Path,
) -> None:
    source, target = trained(FLAT), toy(NAME, HFSDP, seed=8)
    warnings.simplefilter("ignore")  # torch's own
    model, optimizer = get_state_dict(source.model, source.optimizer)
    dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=tmp_path)
    model, optimizer = get_state_dict(target.model, target.optimizer)
    state = {"model": model, "optimizer": optimizer}
    dcp.load(state, checkpoint_id=tmp_path)
    set_state_dict(
        target.model,
        target.optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
    )
    same_toys(target, source)


def test_torchs_function_sets_state_and_moves_no_weight() -> None:
    """`set_optimizer_state_dict` alone, into a fresh optimizer."""
    source, target = trained(FLAT), toy(NAME, FLAT, seed=8)
    before = target.whole()
    warnings.simplefilter("ignore")  # torch's own
    state = get_optimizer_state_dict(source.model, source.optimizer)
    set_optimizer_state_dict(target.model, target.optimizer, state)
    states = {name: value for name, value in source.whole().items() if "/" in name}
    weights = {name: value for name, value in before.items() if "/" not in name}
    assert different(target.whole(), weights | states) == []


class OfOthers(torch.optim.SGD):
    """An optimizer that nobody here knows."""


def test_dcp_cannot_pass_by_an_optimizer_without_places(tmp_path: Path) -> None:
    """Whose state nobody can make ahead."""
    models = [toy(NAME, FLAT) for _ in range(2)]
    source, target = (
        replace(
            one,
            optimizer=fully_shard_optimizer(OfOthers(one.model.parameters(), lr=0.1, momentum=0.9)),
        )
        for one in models
    )
    source.train(1)
    dcp.save({"optimizer": source.optimizer.state_dict()}, checkpoint_id=tmp_path)
    errors = (StateDictError, RuntimeError, dcp.api.CheckpointException)
    with pytest.raises(errors) as raised:
        dcp.load({"optimizer": target.optimizer}, checkpoint_id=tmp_path)
    assert str(raised.value)


@pytest.mark.parametrize("layout", [FLAT, HFSDP])
def test_torch_reads_the_files_into_a_plain_module(layout: Layout, tmp_path: Path) -> None:
    """In one process, without any of our code."""
    source = trained(layout)
    wanted = source.whole()
    dcp.save({"model": source.model.state_dict()}, checkpoint_id=tmp_path)
    if dist.get_rank() > 0:
        return
    plain = {f"module.{k}": torch.zeros_like(v) for k, v in build(NAME).state_dict().items()}
    warnings.simplefilter("ignore")  # of loading in one process, which is the point
    dcp.load({"model": plain}, checkpoint_id=tmp_path, no_dist=True)
    for name, value in plain.items():
        assert torch.equal(value.flatten(), wanted[name]), name


def test_describing_shards_takes_no_communication() -> None:
    """State dicts taken by one rank alone: a collective would never return."""
    source = trained(HFSDP)
    if dist.get_rank() != 1:
        return
    shards = [v for v in source.model.state_dict().values() if isinstance(v, DTensor)]
    state = source.optimizer.state_dict()["state"]
    shards += [v for values in state.values() for v in values.values() if isinstance(v, DTensor)]
    assert len(shards) == 24
    assert all(described_offsets(shard) is not None for shard in shards)


def test_state_dicts_of_inner_modules_are_described_as_well() -> None:
    model: Any = trained(HFSDP).model
    for part in (model.module, model.module.features.first):
        for name, value in part.state_dict().items():
            assert not isinstance(value, DTensor) or described_offsets(value) is not None, name
