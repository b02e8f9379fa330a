"""What one rank does that runs several cells one after the other."""

from __future__ import annotations

import os
import traceback
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch.distributed as dist
from torch.distributed.tensor import debug

from bench.launch.rank import write_failure
from bench.worker.rank import run_rank


def run_in_turn(cells: Sequence[tuple[int, Path]]) -> int:
    """Run each of (free port, run folder); the number of those that failed.

    RANK, WORLD_SIZE and the rest are set as torch.distributed.run does. A cell that fails leaves
    its failure file, and the next one is tried.
    """
    warnings.simplefilter("error")
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()  # each cell has a group of its own
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1"}
    failed = 0
    for port, folder in cells:
        os.environ["MASTER_PORT"] = str(port)
        try:
            run_rank(folder)
            # DTensors of the next cell would be on meshes whose groups are gone.
            debug._clear_sharding_prop_cache()
        except Exception as error:
            failed += 1
            traceback.print_exc()
            write_failure(folder, rank, error)
            if dist.is_initialized():
                dist.destroy_process_group()
    return failed
