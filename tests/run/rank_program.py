"""Program: one rank that runs several cells one after the other, so that torch is imported once.

Arguments: `PORT=RUN_DIR` for each cell. RANK and WORLD_SIZE come from the environment, as from
torch.distributed.run. A cell that fails leaves its failure file, and the next one is tried.
"""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path

import torch.distributed as dist
from torch.distributed.tensor import debug

from bench.launch.failure import write_failure
from bench.launch.parent_death import die_with_parent
from bench.worker.rank import run_rank


def main() -> int:
    die_with_parent(os.getppid())
    failed = 0
    for argument in sys.argv[1:]:
        port, _, folder = argument.partition("=")
        os.environ["MASTER_PORT"] = port
        try:
            run_rank(Path(folder))
            # DTensors of the next cell would be on meshes whose groups are gone.
            debug._clear_sharding_prop_cache()
        except Exception as error:
            failed += 1
            traceback.print_exc()
            write_failure(Path(folder), int(os.environ["RANK"]), error)
            if dist.is_initialized():
                dist.destroy_process_group()
    return failed


if __name__ == "__main__":
    os._exit(main())
