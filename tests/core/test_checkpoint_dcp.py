"""torch.distributed.checkpoint as drop-in users call it, with no function of ours around it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
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


def by_themselves(source: TrainedToy, target: TrainedToy, path: Path) -> None:
    dcp.save({"model": source.model, "optimizer": source.optimizer}, checkpoint_id=path)
    dcp.load({"model": target.model, "optimizer": target.optimizer}, checkpoint_id=path)


def in_the_background(source: TrainedToy, target: TrainedToy, path: Path) -> None:
    """`async_save` copies the state dicts before it writes them."""
    state = {"model": source.model.state_dict(), "optimizer": source.optimizer.state_dict()}
    dcp.async_save(state, checkpoint_id=path).result()
    dcp.load({"model": target.model, "optimizer": target.optimizer}, checkpoint_id=path)


def by_functions(source: TrainedToy, target: TrainedToy, path: Path) -> None:
    model, optimizer = get_state_dict(source.model, source.optimizer)
    dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=path)
    model, optimizer = get_state_dict(target.model, target.optimizer)
    dcp.load({"model": model, "optimizer": optimizer}, checkpoint_id=path)
    set_state_dict(
        target.model, target.optimizer, model_state_dict=model, optim_state_dict=optimizer
    )


@pytest.mark.parametrize("way", [by_themselves, in_the_background, by_functions])
def test_every_way_of_torch_reaches_an_optimizer_that_has_never_stepped(
    way: Callable[[TrainedToy, TrainedToy, Path], None], tmp_path: Path
) -> None:
    source, target = trained(FLAT), toy(NAME, HFSDP, seed=8)
    warnings.simplefilter("ignore")  # torch's own, of its threads and functions
    way(source, target, tmp_path)
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
