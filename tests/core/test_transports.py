"""Native collectives and direct exchange: same results, same accounts, any group."""

from __future__ import annotations

import time
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mfsdp_core.comm.host_connections import HostConnections
from mfsdp_core.comm.host_rendezvous import connections_of
from mfsdp_core.comm.parts import Parts
from mfsdp_core.comm.point_to_point import PointToPointCommunicator
from mfsdp_core.comm.same_host import UNREAD_REDUCTIONS, SameHostCommunicator
from mfsdp_core.comm.torch_backend import TorchCommunicator
from mfsdp_core.comm.wire_log import WireLog
from mfsdp_core.errors import ConfigurationError
from mfsdp_core.events import EventBus
from mfsdp_core.memory.allocators import TemporaryAllocator
from mfsdp_core.memory.ledger import MemoryLedger
from mfsdp_core.memory.scratch import AllocatedScratch
from mfsdp_core.streams import Streams
from oracle.ranks import RankPool, mesh
from oracle.reference import relative_difference
from oracle.sharded import STRATEGIES, shard

pytestmark = pytest.mark.processes

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def direct(
    group: Any, *, by_reading: bool = False
) -> tuple[PointToPointCommunicator, MemoryLedger, WireLog]:
    ledger, events, log = MemoryLedger(), EventBus(), WireLog()
    events.subscribe(log)
    streams = Streams(torch.device("cpu"))
    scratch = AllocatedScratch(TemporaryAllocator(streams, ledger))
    common = (group, "inner", events, streams, scratch)
    if by_reading and group.size() > 1:
        connections = connections_of(group)
        assert isinstance(connections, HostConnections), connections
        return SameHostCommunicator(*common, connections=connections), ledger, log
    return PointToPointCommunicator(*common), ledger, log


def contribution(rank: int, elements: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(elements, generator=torch.Generator().manual_seed(rank)).to(dtype)


def three_ranks() -> Any:
    return dist.new_group([0, 1, 2])


def collectives(size: int, dtype: torch.dtype, by_reading: bool) -> list[bool]:
    """Gather, reduce-scatter and all-reduce of one group against local arithmetic."""
    group = three_ranks() if size == 3 else mesh(size).get_group("dp")
    if dist.get_rank() >= 3 and size == 3:
        return []
    communicator, ledger, _ = direct(group, by_reading=by_reading)
    # More than one stretch that is added up at a time, and a part of one.
    rank, elements = communicator.rank, (70_000 if by_reading else 6) * size
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


def parts_of_both_kinds(size: int, dtype: torch.dtype) -> list[bool]:
    """Even ranks send tensors as they are, odd ones a flat buffer that is scaled; a gap between."""
    group = three_ranks() if size == 3 else mesh(size).get_group("dp")
    if dist.get_rank() >= 3 and size == 3:
        return []
    communicator, ledger, _ = direct(group, by_reading=True)
    rank, first, scale = communicator.rank, dist.get_global_rank(group, 0), 1 / size
    wide = torch.promote_types(dtype, torch.float32)
    offsets, sizes, elements = (0, 70_000, 70_008), (70_000, 3, 50_000), 60_010 * size
    every = [contribution(first + r, elements, dtype) for r in range(size)]
    for value in every:
        value[70_003:70_008] = 0
        value[120_008:] = 0
    scaled = [value * scale for value in every]
    expected = direct(group)[0].reduce_scatter(
        torch.empty(elements // size, dtype=wide),
        scaled[rank].clone(),
        "flat",
        average=False,
        total=wide,
    )
    total = expected.wait().clone()
    source = scaled[rank] if rank % 2 else every[rank]
    tensors = [source[o : o + s].clone() for o, s in zip(offsets, sizes, strict=True)]
    parts = Parts(tensors, offsets, elements, scale, is_scaled=bool(rank % 2))
    out = torch.zeros_like(total)
    found = communicator.reduce_parts(parts, out, "parts", average=False, total=wide).wait()
    uneven = every[rank][: elements - 1].clone()
    alike = uneven.clone()
    communicator.all_reduce(uneven, "uneven", average=True, total=wide).wait()
    direct(group)[0].all_reduce(alike, "uneven", average=True, total=wide).wait()
    whole = torch.zeros(elements, dtype=dtype)
    communicator.all_reduce_parts(parts, whole, "parts", average=False, total=wide).wait()
    own = whole.tensor_split(size)[rank]
    return [
        found is out,
        torch.equal(found, total),
        torch.equal(own, total.to(dtype)),
        torch.equal(uneven, alike),
        torch.equal(tensors[0], source[:70_000]),
        ledger.bytes_by_category()["communication_buffers"] == 0,
    ]


def held_while_nobody_reads() -> int:
    """How many of six gradients are alive while the other rank sleeps and has read none."""
    group = mesh(2).get_group("dp")
    communicator, _, _ = direct(group, by_reading=True)
    full, alive, works = torch.zeros(8), [], []
    if communicator.rank:
        time.sleep(0.5)
    most = 0
    for number in range(6):
        gradient = torch.full((8,), float(number))
        alive.append(weakref.ref(gradient))
        parts = Parts([gradient], (0,), 8, 0.5, is_scaled=False)
        del gradient
        works.append(
            communicator.all_reduce_parts(
                parts, full.clone(), "held", average=False, total=full.dtype
            )
        )
        del parts
        most = max(most, sum(one() is not None for one in alive))
    for work in works:
        work.wait()
    return most


def bits_of(strategy: str, transport: str) -> list[torch.Tensor]:
    toy = shard("linear_stack", strategy, 4, torch.float32, transport=transport)
    toy.run_cycle(1)
    return [p.grad._local_tensor.clone() for p in toy.model.parameters()]


def same_bits(strategy: str) -> bool:
    """Of gradients that are held, against those that are copied into a bucket."""
    pairs = zip(bits_of(strategy, "same_host"), bits_of(strategy, "point_to_point"), strict=True)
    return all(torch.equal(one, other) for one, other in pairs)


def overlapping(by_reading: bool) -> list[bool]:
    """Several operations under way at once, waited for in another order, gathers interleaved
    differently with reductions on every rank."""
    group = mesh(4).get_group("dp")
    communicator, _, _ = direct(group, by_reading=by_reading)
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
    for transport in ("native", "point_to_point", "same_host"):
        toy = shard("linear_stack", strategy, 2, torch.float64, transport=transport)
        toy.model.wire_log.clear()
        toy.run_cycle(3)
        logs.append(list(toy.model.wire_log))
        gradients.append(toy.full_gradient())
    difference = max(relative_difference(gradients[0], other) for other in gradients[1:])
    return difference, logs[0] == logs[1] == logs[2]


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
    for by_reading in (False, True):
        for found in ranks.run(collectives, size, dtype, by_reading):
            assert all(found), found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_parts_are_summed_as_flat_buffers_are(
    ranks: RankPool, size: int, dtype: torch.dtype
) -> None:
    for found in ranks.run(parts_of_both_kinds, size, dtype):
        assert all(found), found


def test_few_gradients_are_held_while_a_rank_is_behind(ranks: RankPool) -> None:
    # Those that were not read yet, and the one that is being sent.
    assert max(ranks.run(held_while_nobody_reads)) <= UNREAD_REDUCTIONS + 1


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_gradients_that_stay_where_they_are_have_the_same_bits(
    ranks: RankPool, strategy: str
) -> None:
    assert all(ranks.run(same_bits, strategy))


def test_operations_may_overlap_and_interleave_differently(ranks: RankPool) -> None:
    for by_reading in (False, True):
        assert ranks.run(overlapping, by_reading) == [[True] * 6] * 4


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
        assert "expected one of auto, native, point_to_point, same_host" in message


def two_models_on_one_group(by_reading: bool) -> list[bool]:
    """Ranks issue the gathers of two communicators in opposite orders, then wait for both."""
    group = mesh(2).get_group("dp")
    communicators = [direct(group, by_reading=by_reading)[0] for _ in range(2)]
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
    for by_reading in (False, True):
        for found in ranks.run(two_models_on_one_group, by_reading):
            assert all(found)
