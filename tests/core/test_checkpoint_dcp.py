"""torch.distributed.checkpoint and whole state dicts, with no function of ours around them."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import DTensor

from conformance.judging import same
from mfsdp_core import fully_shard_model
from mfsdp_core.errors import StateDictError
from mfsdp_core.shard.chunk import described_offsets
from oracle.checkpoints import Layout, TrainedToy, different, toy
from oracle.models import build
from oracle.ranks import mesh

pytestmark = pytest.mark.on_ranks

NAME = "conv_linear"
FLAT: Layout = (4, "optim_grads_params", "none")
HFSDP: Layout = (4, "optim_grads", "optim")
WHOLE = StateDictOptions(full_state_dict=True)


def trained(layout: Layout) -> TrainedToy:
    source = toy(NAME, layout)
    source.train(2)
    return source


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


def by_state_dicts(source: TrainedToy, target: TrainedToy, path: Path) -> None:
    """In torch's documented way."""
    state = {"model": source.model.state_dict(), "optimizer": source.optimizer.state_dict()}
    dcp.save(state, checkpoint_id=path)
    state = {"model": target.model.state_dict(), "optimizer": target.optimizer.state_dict()}
    dcp.load(state, checkpoint_id=path)
    target.model.load_state_dict(state["model"])
    target.optimizer.load_state_dict(state["optimizer"])


@pytest.mark.parametrize(
    ("way", "layout", "other"),
    [
        (by_state_dicts, HFSDP, FLAT),
        (by_themselves, FLAT, HFSDP),
        (in_the_background, FLAT, HFSDP),
        (by_functions, FLAT, HFSDP),
    ],
)
def test_every_way_of_torch_reshards_and_reaches_an_optimizer_that_has_never_stepped(
    way: Callable[[TrainedToy, TrainedToy, Path], None],
    layout: Layout,
    other: Layout,
    tmp_path: Path,
) -> None:
    source, target = trained(layout), toy(NAME, other, seed=8)
    warnings.simplefilter("ignore")  # torch's own, of its threads and functions
    way(source, target, tmp_path)
    assert different(target.whole(), source.whole()) == []
    same("output", target.output(), source.output())


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


def test_torch_reads_the_files_into_a_plain_module(tmp_path: Path) -> None:
    """In one process, without any of our code."""
    source = trained(HFSDP)
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
    """State dicts taken by one rank alone, of parts too: a collective would never return."""
    source = trained(HFSDP)
    if dist.get_rank() != 1:
        return
    inner = source.model.module
    states = [part.state_dict() for part in (source.model, inner, inner.features.first)]
    states += source.optimizer.state_dict()["state"].values()
    shards = [v for state in states for v in state.values() if isinstance(v, DTensor)]
    assert len(shards) == 24 + 8 + 2
    assert all(described_offsets(shard) is not None for shard in shards)


@pytest.mark.parametrize("layout", [(2, "optim", "none"), (4, "no_shard", "none"), FLAT, HFSDP])
def test_whole_state_is_taken_and_set(layout: Layout) -> None:
    """Weights and moments, and the next step."""
    source, target = trained(layout), toy(NAME, layout, seed=8)
    warnings.simplefilter("ignore")  # torch's own
    weights, state = copy.deepcopy(get_state_dict(source.model, source.optimizer, options=WHOLE))
    found = dict(weights)
    for name, values in state["state"].items():
        found |= {f"{name}/{key}": value for key, value in values.items()}
    found = {name: value.flatten() for name, value in found.items()}
    assert different(found, source.whole()) == []
    if layout == HFSDP:
        return  # torch cannot cut what two axes have cut
    set_state_dict(
        target.model,
        target.optimizer,
        model_state_dict=dict(weights),
        optim_state_dict=state,
        options=WHOLE,
    )
    for _ in range(2):
        assert different(target.whole(), source.whole()) == []
        source.train()
        target.train()


def test_rows_that_torch_writes_elsewhere_are_refused() -> None:
    """Into a model's own parameters, as torch's broadcast leaves them.

    A single row of its own fits any rows of ours, and is written to all.
    """
    module = nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 2))
    model = fully_shard_model(module, device_mesh=mesh(2)["dp"], fsdp_unit_modules=[nn.Linear])
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
