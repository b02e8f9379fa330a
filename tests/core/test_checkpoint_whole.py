"""A checkpoint is whole or not there, whatever happens to the processes or the disk."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from mfsdp_core import load_checkpoint, save_checkpoint
from mfsdp_core.errors import CheckpointError
from mfsdp_core.state import checkpoint
from oracle.checkpoints import Layout, TrainedToy, different, toy
from oracle.killed_saver import NAME
from oracle.models import build
from oracle.ranks import RankFailureError, RankPool

pytestmark = pytest.mark.processes

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
    write = checkpoint._write

    def limited(*arguments: Any) -> None:
        if dist.get_rank() == 2:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1024, limit[1]))
        try:
            write(*arguments)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limit)

    with patch.object(checkpoint, "_write", limited), pytest.raises(CheckpointError) as caught:
        save_checkpoint(folder, source.model, source.optimizer, overwrite=True)
    dist.barrier()
    left = sorted(path.name for path in Path(folder).parent.iterdir())
    target = toy(NAME, LAYOUT, seed=8)
    load_checkpoint(folder, target.model, target.optimizer)
    bad = different(target.whole(), kept)
    save_checkpoint(folder, source.model, source.optimizer, overwrite=True)
    load_checkpoint(folder, target.model, target.optimizer)
    return str(caught.value), left, bad, different(target.whole(), source.whole())


def savers(folder: Path, world: int) -> list[tuple[int, str]]:
    """Exit codes and stderr of `world` ranks that save, replace, and lose the last of them."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "oracle.killed_saver", str(folder), str(rank), str(world)],
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(world)
    ]
    try:
        stderr = [process.communicate(timeout=120)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [(process.returncode, said) for process, said in zip(processes, stderr, strict=True)]


def test_a_process_killed_while_saving_leaves_the_previous_checkpoint(
    ranks: RankPool, tmp_path: Path
) -> None:
    assert savers(tmp_path, 1)[0][0] == -signal.SIGKILL
    (tmp_path / "store").unlink(missing_ok=True)
    left = sorted(path.name for path in tmp_path.iterdir())
    assert len(left) == 2
    assert left[0].startswith(".checkpoint.partial-")
    folder = str(tmp_path / "checkpoint")
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
def test_a_killed_rank_is_a_typed_error_on_the_others(ranks: RankPool, tmp_path: Path) -> None:
    (code, said), (killed, _) = savers(tmp_path, 2)
    assert killed == -signal.SIGKILL
    assert code == 1
    assert "CheckpointError" in said
    assert "a rank was lost" in said
    assert ranks.run(differences_from_the_saved, str(tmp_path / "checkpoint")) == [[]] * 4
