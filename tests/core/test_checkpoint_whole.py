"""A checkpoint is whole or not there, whatever happens to the processes or the disk."""

from __future__ import annotations

import os
import resource
import signal
import tempfile
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from bench.testing.workers import ForkServer, WorkerFailure, WorkersError
from mfsdp_core import fully_shard_model, load_checkpoint, save_checkpoint
from mfsdp_core.errors import CheckpointError
from mfsdp_core.state import safe_dcp
from oracle.checkpoints import Layout, TrainedToy, different, toy
from oracle.models import Block, build
from oracle.ranks import RankFailureError, RankPool

pytestmark = pytest.mark.processes

NAME = "linear_stack"
LAYOUT: Layout = (4, "optim_grads_params", "none")


def saved_then_changed(folder: str) -> tuple[TrainedToy, dict[str, torch.Tensor]]:
    """A model that has been saved and has moved on, and what it was when it was saved."""
    source = toy(NAME, LAYOUT)
    source.train(1)
    save_checkpoint(folder, source.model, source.optimizer)
    kept = source.whole()
    source.train(1)
    return source, kept


def differences_from_the_saved(folder: str) -> list[str]:
    """Weights of the checkpoint in `folder` that are not those that were saved first."""
    target = toy(NAME, LAYOUT, seed=8)
    load_checkpoint(folder, target.model)
    wanted = {f"module.{key}": value.flatten() for key, value in build(NAME).state_dict().items()}
    return different(target.whole(), wanted)


def full_disk(folder: str) -> tuple[str, list[str], list[str], list[str]]:
    """What is said, left beside the checkpoint, and in it, after one rank cannot write."""
    source, kept = saved_then_changed(folder)
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    write = safe_dcp.save_tensors

    def limited(*arguments: Any) -> None:
        if dist.get_rank() == 2:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1024, limit[1]))
        try:
            write(*arguments)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limit)

    with patch.object(safe_dcp, "save_tensors", limited), pytest.raises(CheckpointError) as caught:
        save_checkpoint(folder, source.model, source.optimizer, overwrite=True)
    dist.barrier()
    left = sorted(path.name for path in Path(folder).parent.iterdir())
    target = toy(NAME, LAYOUT, seed=8)
    load_checkpoint(folder, target.model, target.optimizer)
    bad = different(target.whole(), kept)
    save_checkpoint(folder, source.model, source.optimizer, overwrite=True)
    load_checkpoint(folder, target.model, target.optimizer)
    return str(caught.value), left, bad, different(target.whole(), source.whole())


def save_and_be_killed(folder: str) -> None:
    """In a rank: the last one is killed while a checkpoint is being replaced."""
    model = fully_shard_model(build(NAME), fsdp_unit_modules=[Block])
    save_checkpoint(folder, model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    if dist.get_rank() == dist.get_world_size() - 1:
        die_at_the_third_tensor()
    save_checkpoint(folder, model, overwrite=True)


def die_at_the_third_tensor() -> None:
    resolve, seen = DefaultSavePlanner.resolve_data, []

    def counted(planner: DefaultSavePlanner, item: Any) -> Any:
        seen.append(item)
        if len(seen) == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return resolve(planner, item)

    DefaultSavePlanner.resolve_data = counted  # type: ignore[method-assign]


def lost(server: ForkServer, folder: str, ranks: int) -> list[WorkerFailure]:
    """How each of so many ranks ended, the last of which was killed."""
    with server.workers(ranks) as workers, pytest.raises(WorkersError) as caught:
        workers.run(save_and_be_killed, folder, seconds=120)
    assert "SIGKILL" in caught.value.failures[-1].text
    return caught.value.failures


def test_a_process_killed_while_saving_leaves_the_previous_checkpoint(
    ranks: RankPool, fork_server: ForkServer, tmp_path: Path
) -> None:
    folder = str(tmp_path / "checkpoint")
    lost(fork_server, folder, 1)
    left = sorted(path.name for path in tmp_path.iterdir())
    assert len(left) == 2
    assert left[0].startswith(".checkpoint.partial-")
    assert ranks.run(differences_from_the_saved, folder) == [[]] * 4
    partial = str(tmp_path / left[0])
    with pytest.raises(RankFailureError, match=r"has no manifest.json.*never finished"):
        ranks.run(differences_from_the_saved, partial)


def test_a_full_disk_is_a_typed_error_that_leaves_the_previous_checkpoint(
    ranks: RankPool,
) -> None:
    with tempfile.TemporaryDirectory() as parent:
        for message, left, bad, afterwards in ranks.run(full_disk, f"{parent}/checkpoint"):
            assert "the checkpoint could not be written. rank 2: " in message
            assert "File too large" in message
            assert left == ["checkpoint"]
            assert (bad, afterwards) == ([], [])


@pytest.mark.nightly
def test_a_killed_rank_is_a_typed_error_on_the_others(
    ranks: RankPool, fork_server: ForkServer, tmp_path: Path
) -> None:
    folder = str(tmp_path / "checkpoint")
    other, _ = lost(fork_server, folder, 2)
    assert "CheckpointError" in other.text
    assert "a rank was lost" in other.text
    assert ranks.run(differences_from_the_saved, folder) == [[]] * 4
