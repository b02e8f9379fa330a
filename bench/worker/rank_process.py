"""The process of a rank: its number, its device, its process group."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Final, Self

import torch
import torch.distributed as dist

from bench.errors import UsageError
from bench.spec import DeviceType, LaunchSpec, ResolvedRun, known_engine

_BACKENDS: Final[dict[DeviceType, str]] = {"cpu": "gloo", "cuda": "nccl"}


@dataclass(frozen=True)
class RankProcess:
    """Rank among `ranks` processes, the device it computes on, and its machine.

    node: number of the machine. local_rank: among `local_ranks` there.
    """

    rank: int
    ranks: int
    device: torch.device
    node: int = 0
    local_rank: int = 0
    local_ranks: int = 1

    @classmethod
    def from_environment(cls, resolved: ResolvedRun) -> Self:
        """Read what torch.distributed.run has set (RANK, WORLD_SIZE, LOCAL_RANK, GROUP_RANK).

        Raises:
            UsageError: started with another number of ranks than the run asks for.
        """
        rank = int(os.environ.get("RANK", "0"))
        ranks = int(os.environ.get("WORLD_SIZE", "1"))
        wanted = resolved.launch.ranks
        if ranks != wanted:
            raise UsageError(
                f"launch.ranks: the run asks for {wanted} ranks, found WORLD_SIZE={ranks}; start "
                f"it with --nproc-per-node {wanted}"
            )
        node = int(os.environ.get("GROUP_RANK", "0"))
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        return cls(rank, ranks, _device(resolved.launch), node, local_rank, local_ranks)


def _device(launch: LaunchSpec) -> torch.device:
    """Local ranks round-robin over the devices that the launch uses."""
    if launch.device == "cpu":
        return torch.device("cpu")
    used = min(torch.cuda.device_count(), -(-launch.ranks // launch.ranks_per_device))
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % max(used, 1))
    torch.cuda.set_device(device)
    return device


def backend(resolved: ResolvedRun) -> str | None:
    """Backend of the process group; None for an engine of one process, which has none."""
    one_process = known_engine(resolved.engine.name).one_process
    if one_process:
        return None
    name = _BACKENDS[resolved.launch.device]
    # Shards in host memory travel by gloo.
    return (
        f"cpu:gloo,cuda:{name}" if name == "nccl" and resolved.engine.setting("offload") else name
    )


@contextmanager
def process_group(process: RankProcess, resolved: ResolvedRun) -> Iterator[None]:
    """The default process group around a block; nothing for `single`.

    It is left in an orderly way only if the block succeeds: after a failure the other ranks may
    be anywhere, and waiting for them would hide the failure behind a time-out.
    """
    name = backend(resolved)
    if name is None:
        yield
        return
    dist.init_process_group(
        name,
        rank=process.rank,
        world_size=process.ranks,
        # Longer than the launcher's own limit: a hang is to be reported as a hang, by the
        # launcher, and not as the crash of whichever rank waited for the rank that hangs.
        timeout=timedelta(seconds=2 * resolved.launch.hang_seconds),
        device_id=process.device if process.device.type == "cuda" else None,
    )
    yield
    dist.barrier()
    dist.destroy_process_group()
