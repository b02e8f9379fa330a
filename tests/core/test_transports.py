"""Native collectives and direct exchange: same results, same accounts, any group."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mfsdp_core.comm.point_to_point import PointToPointCommunicator
from mfsdp_core.comm.torch_backend import TorchCommunicator
from mfsdp_core.comm.wire_log import WireLog
from mfsdp_core.events import EventBus
from mfsdp_core.memory.allocators import AllocatedScratch, TemporaryAllocator
from mfsdp_core.memory.ledger import MemoryLedger
from mfsdp_core.streams import Streams
from oracle.ranks import RankPool, mesh
from oracle.reference import relative_difference
from oracle.sharded import STRATEGIES, shard

pytestmark = pytest.mark.processes


def direct(group: Any) -> tuple[PointToPointCommunicator, MemoryLedger, WireLog]:
    ledger, events, log = MemoryLedger(), EventBus(), WireLog()
    events.subscribe(log)
    streams = Streams(torch.device("cpu"))
    scratch = AllocatedScratch(TemporaryAllocator(streams, ledger))
    return PointToPointCommunicator(group, "inner", events, streams, scratch), ledger, log


def overlapping() -> list[bool]:
    """Several operations under way at once, waited for in another order, gathers interleaved
    differently with reductions on every rank."""
    group = mesh(4).get_group("dp")
    communicator, _, _ = direct(group)
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
    return [
        *(bool((sums[i] == 40 * i + 6).all()) for i in range(3)),
        *(fulls[i].tolist() == [100.0 * i + r for r in range(4) for _ in (0, 1)] for i in range(3)),
    ]


def both_accounts(strategy: str) -> tuple[float, bool]:
    """Gradient difference between the transports, and whether they logged the same."""
    logs, gradients = [], []
    for transport in ("native", "point_to_point"):
        toy = shard("linear_stack", strategy, 2, torch.float64, transport=transport)
        toy.model.wire_log.clear()
        toy.run_cycle(3)
        logs.append(list(toy.model.wire_log))
        gradients.append(toy.full_gradient())
    difference = max(relative_difference(gradients[0], other) for other in gradients[1:])
    return difference, logs[0] == logs[1]


def default_transport(strategy: str) -> str:
    toy = shard("linear_stack", strategy, 4)
    (first, *_) = [g for unit in toy.model._context.units for g in unit.groups]
    return type(first.gradients._communicator).__name__


def test_operations_may_overlap_and_interleave_differently(ranks: RankPool) -> None:
    assert ranks.run(overlapping) == [[True] * 6] * 4


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_all_transports_log_the_same_and_agree(ranks: RankPool, strategy: str) -> None:
    for difference, same_log in ranks.run(both_accounts, strategy):
        assert difference < 1e-15
        assert same_log


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_gloo_exchanges_directly_by_default_where_gradients_are_scattered(
    ranks: RankPool, strategy: str
) -> None:
    kind = TorchCommunicator if strategy == "no_shard" else PointToPointCommunicator
    assert ranks.run(default_transport, strategy) == [kind.__name__] * 4
