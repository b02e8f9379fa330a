"""Ranks that save a checkpoint; the last of them is killed while it is being replaced.

python -m oracle.killed_saver FOLDER RANK WORLD
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from mfsdp_core import fully_shard_model, save_checkpoint
from oracle.models import Block, build

NAME = "linear_stack"


def main(parent: str, rank: int, world: int) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{parent}/store", world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    model = fully_shard_model(build(NAME), fsdp_unit_modules=[Block])
    folder = Path(parent) / "checkpoint"
    save_checkpoint(folder, model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    if rank == world - 1:
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


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
