"""Native collectives and direct exchange: same results, same accounts, any group."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from mfsdp_core.comm.point_to_point import PointToPointCommunicator
from mfsdp_core.comm.torch_backend import TorchCommunicator
from mfsdp_core.comm.wire_log import WireLog
from mfsdp_core.errors import ConfigurationError
from mfsdp_core.events import EventBus
from mfsdp_core.memory.allocators import AllocatedScratch, TemporaryAllocator
from mfsdp_core.memory.ledger import MemoryLedger
from mfsdp_core.streams import Streams
from oracle.ranks import RankPool, mesh
from oracle.reference import relative_difference
from oracle.sharded import STRATEGIES, shard

pytestmark = pytest.mark.processes

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def direct(group: Any) -> tuple[PointToPointCommunicator, MemoryLedger, WireLog]:
    ledger, events, log = MemoryLedger(), EventBus(), WireLog()
    events.subscribe(log)
    streams = Streams(torch.device("cpu"))
    scratch = AllocatedScratch(TemporaryAllocator(streams, ledger))
    return PointToPointCommunicator(group, "inner", events, streams, scratch), ledger, log


def contribution(rank: int, elements: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(elements, generator=torch.Generator().manual_seed(rank)).to(dtype)


def three_ranks() -> Any:
    return dist.new_group([0, 1, 2])


def collectives(size: int, dtype: torch.dtype) -> list[bool]:
    """Gather, reduce-scatter and all-reduce of one group against local arithmetic."""
    group = three_ranks() if size == 3 else mesh(size).get_group("dp")
    if dist.get_rank() >= 3 and size == 3:
        return []
    communicator, ledger, _ = direct(group)
    rank, elements = communicator.rank, 6 * size
    first = dist.get_global_rank(group, 0)
    inputs = [contribution(first + r, elements, dtype) for r in range(size)]
    wide = torch.promote_types(dtype, torch.float32)
    total = torch.zeros(elements, dtype=wide)
    for value in inputs:
        total += value.to(wide)

    full = torch.empty(elements, dtype=dtype)
    own = inputs[rank].tensor_split(size)[rank].clone()
    communicator.all_gather(full, own, "bucket").wait()
    gathered = torch.cat([inputs[r].tensor_split(size)[r] for r in range(size)])

    data = inputs[rank].clone()
    part = data.tensor_split(size)[rank]
    as_sum = {"average": False, "total": wide}
    reduced = communicator.reduce_scatter(part, data, "bucket", **as_sum).wait()
    apart = torch.empty(part.numel(), dtype=wide)
    assert communicator.reduces_into(wide, wide)
    as_mean = {"average": True, "total": wide}
    mean = communicator.reduce_scatter(apart, inputs[rank].clone(), "bucket", **as_mean).wait()
    everywhere = inputs[rank].clone()
    communicator.all_reduce(everywhere, "bucket", **as_sum).wait()
    return [
        torch.equal(full, gathered),
        torch.equal(reduced.to(wide), total.tensor_split(size)[rank]),
        torch.equal(mean, total.tensor_split(size)[rank] / size),
        mean is apart,
        torch.equal(everywhere, total.to(dtype)),
        ledger.bytes_by_category()["communication_buffers"] == 0,
    ]


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


def unknown_transport() -> str:
    with pytest.raises(ConfigurationError) as error:
        shard("linear_stack", 3, 4, transport="carrier_pigeon")
    return str(error.value)


@pytest.mark.sample
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_direct_exchange_is_exact_and_returns_its_memory(
    ranks: RankPool, size: int, dtype: torch.dtype
) -> None:
    for found in ranks.run(collectives, size, dtype):
        assert all(found), found


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


def test_an_unknown_transport_is_refused(ranks: RankPool) -> None:
    for message in ranks.run(unknown_transport):
        assert "expected one of auto, native, point_to_point" in message


def two_models_on_one_group() -> list[bool]:
    """Ranks issue the gathers of two communicators in opposite orders, then wait for both."""
    group = mesh(2).get_group("dp")
    communicators = [direct(group)[0] for _ in range(2)]
    rank = communicators[0].rank
    first = dist.get_global_rank(group, 0)
    found = []
    for _ in range(3):
        fulls = [torch.empty(8), torch.empty(8)]
        works: list[Any] = [None, None]
        for which in (0, 1) if rank == 0 else (1, 0):
            own = torch.full((4,), 10.0 * which + first + rank)
            works[which] = communicators[which].all_gather(fulls[which], own, "bucket")
        for work in works:
            work.wait()
        for which, full in enumerate(fulls):
            wanted = [10.0 * which + first + r for r in range(2) for _ in range(4)]
            found.append(full.tolist() == wanted)
    return found


def test_two_models_on_one_group_never_take_each_others_messages(ranks: RankPool) -> None:
    for found in ranks.run(two_models_on_one_group):
        assert all(found)
