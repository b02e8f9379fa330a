"""What frameworks do with a sharded model works, or is refused in words (docs/frameworks.md)."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from mfsdp_core import export_state_dict, fully_shard_model, save_safetensors
from mfsdp_core.errors import LifecycleError, MfsdpError
from oracle.beside_torch import beside, own_batch, refusal
from oracle.llama import llama
from oracle.models import Chain, loss
from oracle.ranks import RankPool, mesh

pytestmark = pytest.mark.processes

WAY = ("optim_grads_params", "storage_resize")


def saved_by_transformers(folder: Path, tied: bool) -> tuple[bool, bool, str, str]:
    """Whether both ways of saving come back, what save_pretrained says by itself, and resizing."""
    warnings.simplefilter("ignore")  # of transformers
    plain = llama(tied)
    model = fully_shard_model(
        llama(tied),
        device_mesh=mesh(2)["dp"],
        fsdp_unit_modules=[type(plain.model.layers[0])],
    )
    said = refusal(lambda: model.module.save_pretrained(folder / "refused"), MfsdpError)
    resized = refusal(lambda: model.module.resize_token_embeddings(70), MfsdpError)
    is_first = mesh(2).get_local_rank("dp") == 0
    state = export_state_dict(model)
    save_safetensors(folder / "core", model)
    if is_first:
        model.module.save_pretrained(folder / "theirs", state_dict=state)
        model.module.config.save_pretrained(folder / "core")
    dist.barrier(mesh(2).get_group("dp"))
    back = [type(plain).from_pretrained(folder / name) for name in ("theirs", "core")]
    wanted = plain.state_dict()
    same = [all(torch.equal(v, wanted[k]) for k, v in b.state_dict().items()) for b in back]
    return same[0], same[1], said, resized


def asked_of_the_wrapper() -> list[str]:
    """What is said of attributes of the module inside, of a second wrapper and of a copy."""
    model = beside(Chain, WAY).model
    model.module.generate = model.module.forward
    weight = model.module.head.weight
    return [
        refusal(lambda: model.generate, AttributeError),
        refusal(lambda: model.blocks, AttributeError),
        refusal(lambda: model.nothing, AttributeError),
        refusal(lambda: DistributedDataParallel(model), LifecycleError),
        refusal(lambda: type(weight)(weight.detach(), requires_grad=True), LifecycleError),
    ]


def moved() -> tuple[list[str], float, torch.dtype]:
    """What is said of casts of the inner module; whether a move to where it is changes anything."""

    class WithBuffer(Chain):
        def __init__(self) -> None:
            super().__init__()
            self.head.register_buffer("seen", torch.zeros(2, device="cpu"))

    pair = beside(WithBuffer, WAY)
    inner: nn.Module = pair.model.module
    inner.to("cpu")
    said = [refusal(inner.half, LifecycleError), refusal(inner.blocks[0].up.half, LifecycleError)]
    for module in pair.both:
        loss(module(own_batch(0))).backward()
    return said, pair.worst_gradient(), inner.head.seen.dtype


def test_wrappers_and_copies_of_frameworks_are_answered_in_words(ranks: RankPool) -> None:
    for generate, blocks, nothing, wrapped, copied in ranks.run(asked_of_the_wrapper):
        assert "model.module.generate. All ranks call it together" in generate
        assert "model.module.blocks" in blocks
        assert "object has no attribute 'nothing'" in nothing
        assert "averaged over ranks already" in wrapped
        assert "not offloaded to the CPU" in copied


def test_the_inner_module_stays_where_it_is(ranks: RankPool) -> None:
    for said, worst, dtype in ranks.run(moved):
        assert all("cannot change its dtype or device" in one for one in said)
        assert worst < 1e-12
        assert dtype is torch.float64


@pytest.mark.parametrize("tied", [False, True])
def test_transformers_saves_whole_weights(ranks: RankPool, tmp_path: Path, tied: bool) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("safetensors")
    for theirs, core, said, resized in ranks.run(saved_by_transformers, tmp_path, tied):
        assert theirs
        assert core
        assert "save_pretrained(state_dict=...)" in said
        assert "load export_state_dict(model) into an unsharded model" in resized
