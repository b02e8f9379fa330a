"""Native collectives and direct exchange: same results, same accounts, any group."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mfsdp_core.comm.point_to_point import PointToPointCommunicator
from mfsdp_core.comm.torch_backend import Communicator
from mfsdp_core.events import EventBus
from mfsdp_core.memory.allocators import AllocatedScratch, TemporaryAllocator
from mfsdp_core.memory.ledger import MemoryLedger
from mfsdp_core.streams import Streams
from oracle.ranks import mesh
from oracle.reference import compare
from oracle.sharded import STRATEGIES, shard

pytestmark = pytest.mark.on_ranks


def direct(group: Any) -> PointToPointCommunicator:
    streams = Streams(torch.device("cpu"))
    scratch = AllocatedScratch(TemporaryAllocator(streams, MemoryLedger()))
    return PointToPointCommunicator(group, "inner", EventBus(), streams, scratch)


def test_operations_may_overlap_and_interleave_differently() -> None:
    """Waited for in another order, gathers and reductions in another one on every rank."""
    group = mesh(4).get_group("dp")
    communicator = direct(group)
    rank = communicator.rank
    fulls = [torch.empty(8) for _ in range(3)]
    buckets = [torch.full((8,), float(10 * i + rank)) for i in range(3)]

    def own(bucket: torch.Tensor) -> torch.Tensor:
        return bucket.tensor_split(4)[rank]

    def gather() -> list[Any]:
        return [
            communicator.all_gather(fulls[i], torch.full((2,), float(100 * i + rank)), f"g{i}")
            for i in range(3)
        ]

    def reduce() -> list[Any]:
        return [
            communicator.reduce_scatter(
                own(buckets[i]), buckets[i], f"r{i}", average=False, total=torch.float32
            )
            for i in range(3)
        ]

    if rank % 2:
        reductions, gathers = reduce(), gather()
    else:
        gathers, reductions = gather(), reduce()
    sums = [pending.wait() for pending in reversed(reductions)][::-1]
    for pending in gathers:
        pending.wait()
    for i in range(3):
        assert bool((sums[i] == 40 * i + 6).all()), sums
        assert fulls[i].tolist() == [100.0 * i + r for r in range(4) for _ in (0, 1)], fulls


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_all_transports_log_the_same_and_agree(strategy: str) -> None:
    logs, gradients = [], []
    for transport in ("native", "point_to_point"):
        toy = shard("linear_stack", strategy, 2, torch.float64, transport=transport)
        toy.model.wire_log.clear()
        toy.run_cycle(3)
        logs.append(list(toy.model.wire_log))
        gradients.append(toy.full_gradient())
    compare(*gradients, 1e-15)
    assert logs[0] == logs[1]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_gloo_exchanges_directly_by_default_where_gradients_are_scattered(strategy: str) -> None:
    toy = shard("linear_stack", strategy, 4)
    (first, *_) = [g for unit in toy.model._context.units for g in unit.buckets]
    kind = Communicator if strategy == "no_shard" else PointToPointCommunicator
    assert type(first.gradients._communicator) is kind
