"""What frameworks do with a sharded model works, or is refused in words (docs/frameworks.md)."""

from __future__ import annotations

import importlib.util
import warnings
from pathlib import Path

import pytest
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from conformance.judging import same
from mfsdp_core import export_state_dict, fully_shard_model, save_safetensors
from mfsdp_core.errors import LifecycleError, MfsdpError
from oracle.beside_torch import beside
from oracle.llama import llama
from oracle.models import Chain
from oracle.ranks import mesh

pytestmark = pytest.mark.on_ranks

WAY = ("optim_grads_params", "storage_resize")


def test_wrappers_and_copies_of_frameworks_are_answered_in_words() -> None:
    """Attributes of the module inside, a second wrapper, a copy."""
    model = beside(Chain, WAY).model
    model.module.generate = model.module.forward
    weight = model.module.head.weight
    for error, words, action in (
        (
            AttributeError,
            r"model\.module\.generate\. All ranks call it together",
            lambda: model.generate,
        ),
        (AttributeError, r"model\.module\.blocks", lambda: model.blocks),
        (AttributeError, "object has no attribute 'nothing'", lambda: model.nothing),
        (
            LifecycleError,
            "averaged over ranks already",
            lambda: DistributedDataParallel(model),
        ),
        (
            LifecycleError,
            "not offloaded to the CPU",
            lambda: type(weight)(weight.detach(), requires_grad=True),
        ),
    ):
        with pytest.raises(error, match=words):
            action()


@pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("transformers", "safetensors"))),
    reason="transformers or safetensors is not installed (pip install -e '.[dev]')",
)
@pytest.mark.parametrize("tied", [False, True])
def test_transformers_saves_whole_weights(tmp_path: Path, tied: bool) -> None:
    """And the core; neither save_pretrained by itself nor a resized embedding is let through."""
    warnings.simplefilter("ignore")  # of transformers
    plain = llama(tied)
    model = fully_shard_model(
        llama(tied),
        device_mesh=mesh(2)["dp"],
        fsdp_unit_modules=[type(plain.model.layers[0])],
    )
    with pytest.raises(MfsdpError, match=r"save_pretrained\(state_dict=\.\.\.\)"):
        model.module.save_pretrained(tmp_path / "refused")
    words = r"load export_state_dict\(model\) into an unsharded model"
    with pytest.raises(MfsdpError, match=words):
        model.module.resize_token_embeddings(70)
    state = export_state_dict(model)
    save_safetensors(tmp_path / "core", model)
    if mesh(2).get_local_rank("dp") == 0:
        model.module.save_pretrained(tmp_path / "theirs", state_dict=state)
        model.module.config.save_pretrained(tmp_path / "core")
    dist.barrier(mesh(2).get_group("dp"))
    wanted = plain.state_dict()
    for name in ("theirs", "core"):
        back = type(plain).from_pretrained(tmp_path / name).state_dict()
        for key, value in back.items():
            same(f"{key} of {name}", value, wanted[key])
