"""Reads of sharded weights: ranks agree on what they read, or refuse in words on all ranks."""

from __future__ import annotations

import copy
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate

from mfsdp_core import (
    export_state_dict,
    fully_shard_model,
    fully_shard_optimizer,
    gather_full,
    save_checkpoint,
    save_safetensors,
)
from mfsdp_core.errors import LifecycleError, MismatchedReadError
from mfsdp_core.uneven_dtensor import gather_and_compute_chunk_metadata
from oracle.beside_torch import beside, own_batch
from oracle.models import Chain, loss
from oracle.ranks import mesh

pytestmark = pytest.mark.on_ranks

WAY = ("optim_grads_params", "storage_resize")
#: Reads of one weight; ranks that give them different weights of one shape must hear of it.
READS: dict[str, Callable[[Tensor], Any]] = {
    "norm": lambda w: w.norm().item(),
    "sum": lambda w: w.sum().full_tensor(),
    "full_tensor": lambda w: w.full_tensor(),
    "gather_full": gather_full,
    "replicas": lambda w: w.redistribute(placements=[Replicate()] * w.device_mesh.ndim),
    "of a copy": lambda w: gather_full(copy.deepcopy(w)),
    "computed": lambda w: gather_full(w.detach() * 2),
    "where rows lie": gather_and_compute_chunk_metadata,
}


@pytest.mark.parametrize("what", READS)
def test_ranks_that_read_weights_in_other_orders_all_hear_of_it(what: str) -> None:
    """Both ways round, and read together they are right again."""
    pair = beside(Chain, WAY)
    both = [pair.model.module.blocks[i].up.weight for i in (0, 1)]
    for own in (0, 1):
        chosen = both[own] if mesh(2).get_local_rank("dp") == 0 else both[1 - own]
        with pytest.raises(MismatchedReadError, match="rank 1 reads") as refused:
            READS[what](chosen)
        said = str(refused.value)
        names = [f"blocks.{number}.up.weight" for number in (own, 1 - own)]
        assert said.index(names[0]) < said.index(names[1]), said
    assert torch.equal(gather_full(both[0]), pair.plain.blocks[0].up.weight)


def test_ranks_that_do_different_things_all_hear_of_it(tmp_path: Path) -> None:
    pair = beside(Chain, WAY)
    model, is_first = pair.model, mesh(2).get_local_rank("dp") == 0
    optimizer = fully_shard_optimizer(torch.optim.AdamW(model.parameters()))
    loss(model(own_batch(0))).backward()
    weight = model.module.blocks[0].up.weight

    def read_a_moment() -> None:
        optimizer.step()
        moments = optimizer.state[weight]
        gather_full(moments["exp_avg" if is_first else "exp_avg_sq"])

    def write() -> None:
        if is_first:
            export_state_dict(model)
        else:
            save_checkpoint(tmp_path / "checkpoint", model)

    def write_files() -> None:
        save_safetensors(tmp_path / "files", model, max_file_bytes=300 if is_first else 3000)

    name = "blocks.0.up.weight"
    for action, words in (
        (lambda: gather_full(weight if is_first else weight.grad), [f"gradient of {name}"]),
        (read_a_moment, [f"exp_avg of {name}", "exp_avg_sq of"]),
        (
            lambda: gather_full(weight) if is_first else weight.norm().item(),
            [f"redistribute of linalg_vector_norm on {name}"],
        ),
        (
            lambda: weight.norm(1 if is_first else 2).item(),
            ["_NormPartial(1)", "_NormPartial(2)"],
        ),
        (write, ["export_state_dict()", "save_checkpoint()"]),
        (write_files, ["export of"]),
    ):
        with pytest.raises(MismatchedReadError) as refused:
            action()
        assert all(one in str(refused.value) for one in words), (words, refused.value)


def test_a_rank_that_reads_alone_is_told_at_the_time_limit() -> None:
    """After reads with another time limit."""
    patient = fully_shard_model(Chain(), device_mesh=mesh(4), dp_shard_dim="dp")
    gather_full(patient.module.head.weight)
    group = dist.new_group(list(range(4)))
    torch.manual_seed(0)
    model = fully_shard_model(Chain(), device_mesh=DeviceMesh.from_group(group, "cpu"))
    weight = model.module.head.weight
    options = group._get_backend(torch.device("cpu")).options
    usual = options._timeout
    if dist.get_rank() == 2:
        options._timeout = timedelta(seconds=1)
        with pytest.raises(MismatchedReadError, match=r"rank 2 reads head\.weight") as refused:
            gather_full(weight)
        words = "only 1 of the ranks [0, 1, 2, 3] came within 1 s"
        assert words in str(refused.value), refused.value
        options._timeout = usual
    dist.barrier()
    assert gather_full(weight).shape == weight.shape


def test_a_norm_as_a_number_is_the_same_on_every_rank() -> None:
    pair = beside(Chain, WAY)
    weight = pair.model.module.head.weight.detach()
    own = torch.tensor([weight.norm().item(), float(weight.sum())], dtype=torch.float64)
    both = [torch.empty_like(own) for _ in range(2)]
    dist.all_gather(both, own, group=mesh(2).get_group("dp"))
    assert torch.equal(*both), both
    assert own[0].item() == pytest.approx(float(pair.plain.head.weight.detach().norm()), rel=1e-12)


def test_asking_for_storage_names_what_to_call() -> None:
    model = beside(Chain, WAY).model
    weight = model.module.head.weight
    asked: tuple[Callable[[], Any], ...] = (
        weight.data_ptr,
        weight.untyped_storage,
        model.state_dict()["module.head.weight"].storage,
        weight.detach().mul(2).data_ptr,
    )
    for action in asked:
        with pytest.raises(LifecycleError, match=r"export_state_dict\(model\)") as refused:
            action()
        assert "save_safetensors(path, model)" in str(refused.value)
