"""Reads of sharded weights: ranks agree on what they read, or refuse in words on all ranks."""

from __future__ import annotations

import copy
from collections.abc import Callable
from datetime import timedelta
from functools import partial
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
from oracle.beside_torch import beside, own_batch, refusal
from oracle.models import Chain, loss
from oracle.ranks import RankPool, mesh

pytestmark = pytest.mark.processes

WAY = ("optim_grads_params", "storage_resize")
#: Reads of one weight; ranks that give them different weights of one shape must hear of it.
READS: dict[str, Callable[[Tensor], Any]] = {
    "view": lambda w: w.view(-1),
    "norm": lambda w: w.norm().item(),
    "maximum": lambda w: float(w.max()),
    "sum": lambda w: w.sum().full_tensor(),
    "full_tensor": lambda w: w.full_tensor(),
    "gather_full": gather_full,
    "replicas": lambda w: w.redistribute(placements=[Replicate()] * w.device_mesh.ndim),
    "a row": lambda w: w[0].full_tensor(),
    "a product": lambda w: (w @ w.mT).full_tensor(),
    "of a copy": lambda w: gather_full(copy.deepcopy(w)),
    "computed": lambda w: gather_full(w.detach() * 2),
    "where rows lie": gather_and_compute_chunk_metadata,
}


def read_in_other_orders() -> dict[str, tuple[str, str, bool]]:
    """Per read what both ways round say, and whether the same read together is then right."""
    pair = beside(Chain, WAY)
    rank = mesh(2).get_local_rank("dp")
    first, second = (pair.model.module.blocks[i].up.weight for i in (0, 1))
    found = {}
    for what, read in READS.items():
        ordered = (first, second) if rank == 0 else (second, first)
        said = [refusal(partial(read, w), MismatchedReadError) for w in ordered]
        whole = pair.plain.blocks[0].up.weight
        together = torch.equal(gather_full(first), whole)
        found[what] = (*said, together)
    return found


def read_different_things(folder: Path) -> list[str]:
    """What is said where the ranks do not do the same with the model."""
    pair = beside(Chain, WAY)
    model, is_first = pair.model, mesh(2).get_local_rank("dp") == 0
    optimizer = fully_shard_optimizer(torch.optim.AdamW(model.parameters()))
    loss(model(own_batch(0))).backward()
    weight = model.module.blocks[0].up.weight
    said = [refusal(lambda: gather_full(weight if is_first else weight.grad), MismatchedReadError)]
    optimizer.step()
    moments = optimizer.state[weight]
    chosen = moments["exp_avg" if is_first else "exp_avg_sq"]
    pulled = copy.deepcopy(model.module)
    unit = pulled.blocks[0 if is_first else 1]

    def evaluate() -> None:
        with torch.no_grad():
            unit(own_batch(0))

    def write() -> None:
        if is_first:
            export_state_dict(model)
        else:
            save_checkpoint(folder / "checkpoint", model)

    actions: tuple[Callable[[], Any], ...] = (
        lambda: gather_full(chosen),
        lambda: gather_full(weight) if is_first else weight.norm().item(),
        lambda: weight.norm(1 if is_first else 2).item(),
        evaluate,
        write,
        lambda: save_safetensors(folder / "files", model, max_file_bytes=300 if is_first else 3000),
    )
    return said + [refusal(action, MismatchedReadError) for action in actions]


def read_alone() -> str:
    """What a rank is told whose peers do not read, after reads with another time limit."""
    patient = fully_shard_model(Chain(), device_mesh=mesh(4), dp_shard_dim="dp")
    gather_full(patient.module.head.weight)
    group = dist.new_group(list(range(4)), timeout=timedelta(seconds=1))
    torch.manual_seed(0)
    model = fully_shard_model(Chain(), device_mesh=DeviceMesh.from_group(group, "cpu"))
    weight = model.module.head.weight
    alone = dist.get_rank() == 2
    said = refusal(lambda: gather_full(weight), MismatchedReadError) if alone else ""
    dist.barrier()
    assert gather_full(weight).shape == weight.shape
    return said


def one_number() -> tuple[float, float, float]:
    """Norm and sum of a weight, as this rank sees them, and the true norm."""
    pair = beside(Chain, WAY)
    weight = pair.model.module.head.weight.detach()
    return weight.norm().item(), float(weight.sum()), float(pair.plain.head.weight.detach().norm())


def ask_for_storage() -> list[str]:
    pair = beside(Chain, WAY)
    model = pair.model
    weight = model.module.head.weight
    asked: tuple[Callable[[], Any], ...] = (
        weight.data_ptr,
        weight.untyped_storage,
        model.state_dict()["module.head.weight"].storage,
        weight.detach().mul(2).data_ptr,
    )
    return [refusal(action, LifecycleError) for action in asked]


def test_ranks_that_read_weights_in_other_orders_all_hear_of_it(ranks: RankPool) -> None:
    for rank, found in enumerate(ranks.run(read_in_other_orders)):
        for what, (first, second, together) in found.items():
            for said, own in ((first, 0), (second, 1)):
                names = [f"blocks.{number}.up.weight" for number in (own, 1 - own)]
                assert "rank 1 reads" in said, (what, rank, said)
                assert said.index(names[0]) < said.index(names[1]), (what, rank, said)
            assert together, (what, rank)


def test_ranks_that_do_different_things_all_hear_of_it(ranks: RankPool, tmp_path: Path) -> None:
    for said in ranks.run(read_different_things, tmp_path):
        gradient, moment, norm, kinds, copied, written, files = said
        assert "gradient of blocks.0.up.weight" in gradient
        assert "exp_avg of blocks.0.up.weight" in moment
        assert "exp_avg_sq of" in moment
        assert "redistribute of linalg_vector_norm on blocks.0.up.weight" in norm
        assert "_NormPartial(1)" in kinds
        assert "_NormPartial(2)" in kinds
        assert "blocks.0.up.weight" in copied
        assert "blocks.1.up.weight" in copied
        assert "export_state_dict()" in written
        assert "save_checkpoint()" in written
        assert "export of" in files


def test_a_rank_that_reads_alone_is_told_at_the_time_limit(ranks: RankPool) -> None:
    said = ranks.run(read_alone)
    assert "rank 2 reads head.weight" in said[2]
    assert "only 1 of the ranks [0, 1, 2, 3] came within 1 s" in said[2]


def test_a_norm_as_a_number_is_the_same_on_every_rank(ranks: RankPool) -> None:
    (norm, total, wanted), (other, other_total, _) = ranks.run(one_number)[:2]
    assert norm == other == pytest.approx(wanted, rel=1e-12)
    assert total == other_total


def test_asking_for_storage_names_what_to_call(ranks: RankPool) -> None:
    for said in ranks.run(ask_for_storage)[0]:
        assert "export_state_dict(model)" in said
        assert "save_safetensors(path, model)" in said
