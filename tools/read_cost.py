"""What it costs that ranks agree before they read a sharded weight: `python -m tools.read_cost`.

Ranks of gloo read one weight again and again by `gather_full`, with the agreement and without it,
in turn. Printed are the median of a read on the first rank, and the requests of a rank to the
store; the last rank of a rendezvous makes more of them. Nothing is judged here.
"""

from __future__ import annotations

import argparse
import os
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from statistics import median, quantiles
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d
from torch.multiprocessing.spawn import spawn

from mfsdp_core import fully_shard_model, gather_full

_ELEMENTS = (1 << 10, 1 << 16, 1 << 20)
_AGREEMENT = "mfsdp_core.shard.dtensor.agree_on_read"
_REQUESTS = ("add", "check", "delete_key", "get", "set", "wait")


def _nothing(*_arguments: object) -> None:
    """In the place of the agreement."""


class _Counting:
    """A store that counts requests."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self.requests = 0

    def __getattr__(self, name: str) -> Callable[..., object]:
        self.requests += name in _REQUESTS
        found: Callable[..., object] = getattr(self._store, name)
        return found


def _measure(rank: int, ranks: int, port: int, repeats: int) -> None:
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    for elements in _ELEMENTS:
        model = fully_shard_model(nn.Linear(1 << 8, elements >> 8, bias=False))
        weight = model.module.weight
        seconds: dict[bool, list[float]] = {True: [], False: []}
        for _ in range(repeats):
            for agrees, into in seconds.items():
                with nullcontext() if agrees else patch(_AGREEMENT, _nothing):
                    dist.barrier()
                    start = time.perf_counter()
                    gather_full(weight)
                    into.append(time.perf_counter() - start)
        counting = _Counting(distributed_c10d._get_default_store())
        with patch.object(distributed_c10d, "_get_default_store", lambda c=counting: c):
            for _ in range(repeats):
                gather_full(weight)
        counts = [0.0] * ranks
        dist.all_gather_object(counts, counting.requests / repeats)
        if rank == 0:
            shown = "; ".join(
                f"{'with' if agrees else 'without'} {1e6 * median(found):.0f} us "
                f"({1e6 * quantiles(found, n=4)[0]:.0f} to {1e6 * quantiles(found, n=4)[2]:.0f})"
                for agrees, found in seconds.items()
            )
            requests = ", ".join(f"{count:.1f}" for count in counts)
            print(f"{ranks} ranks, {elements * 4 >> 10} KiB: {shown}; requests {requests}")
    dist.destroy_process_group()


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--repeats", type=int, default=200)
    options = parser.parse_args(arguments)
    for ranks in options.ranks:
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            port = found.getsockname()[1]
        spawn(_measure, (ranks, port, options.repeats), nprocs=ranks)


if __name__ == "__main__":
    main()
