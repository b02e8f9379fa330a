"""Direct exchange sums what ranks send exactly: BF16 on the wire, FP32 in the sum, in rank order.

The expected gradient is made of plain autograd and explicit additions. Native gloo, which rounds
each partial sum to BF16, gives another one, by a difference that is measured here.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from mfsdp_core import MixedPrecisionPolicy, fully_shard_model
from mfsdp_core.comm.point_to_point import PointToPointCommunicator
from mfsdp_core.events import EventBus
from mfsdp_core.memory.allocators import TemporaryAllocator
from mfsdp_core.memory.ledger import MemoryLedger
from mfsdp_core.memory.scratch import AllocatedScratch
from mfsdp_core.streams import Streams
from oracle.models import TOYS, batch, build, loss
from oracle.ranks import WORLD, RankPool
from oracle.sharded import STRATEGIES

pytestmark = pytest.mark.processes

TOY = "linear_stack"
SIZES = (2, 3, 4)
LOW = torch.bfloat16


@cache
def axis(size: int) -> DeviceMesh:
    """A mesh over the first `size` ranks; every rank has to call this, members or not."""
    return DeviceMesh("cpu", list(range(size)), mesh_dim_names=("dp",))


def contribution(rank: int, size: int) -> dict[str, torch.Tensor]:
    """What `rank` sends: its gradients in BF16, divided by the number of ranks in BF16."""
    model = build(TOY, LOW)
    loss(model(batch(TOY, rank, 0, LOW))).backward()
    return {name: p.grad.mul(1 / size) for name, p in model.named_parameters()}


def exact_sum(size: int, *, rounded: bool) -> dict[str, torch.Tensor]:
    """c0 + c1 + ... in FP32, in rank order; rounded to BF16 once where the result is sent on."""
    first, *rest = (contribution(rank, size) for rank in range(size))
    total = {name: value.float() for name, value in first.items()}
    for other in rest:
        total = {name: value + other[name].float() for name, value in total.items()}
    return {name: v.to(LOW).float() for name, v in total.items()} if rounded else total


def reduced(strategy: str, size: int, transport: str) -> dict[str, torch.Tensor]:
    """Main gradients of this rank (rows of a shard, or all of it) after one microbatch."""
    model = fully_shard_model(
        build(TOY, LOW),
        device_mesh=axis(size),
        fsdp_unit_modules=list(TOYS[TOY].units),
        zero_dp_strategy=strategy,
        mixed_precision_policy=MixedPrecisionPolicy(
            torch.float32, torch.float32, LOW, reduce_dtype=LOW if transport == "native" else None
        ),
        transport=transport,
    )
    loss(model(batch(TOY, dist.get_rank(), 0, LOW))).backward()
    return {name.removeprefix("module."): p.grad.to_local() for name, p in model.named_parameters()}


def whole(local: dict[str, torch.Tensor], size: int, strategy: str) -> dict[str, torch.Tensor]:
    """Whole gradients from the shards of all ranks."""
    if strategy == "no_shard":
        return local
    pieces: list[Any] = [None] * size
    dist.all_gather_object(pieces, local, group=axis(size).get_group())
    return {name: torch.cat([piece[name] for piece in pieces]) for name in local}


def compare(strategy: str, size: int) -> dict[str, Any]:
    """Both transports against the exact sum; the direct one twice."""
    axis(size)
    if dist.get_rank() >= size:
        return {}
    expected = exact_sum(size, rounded=strategy == "no_shard")
    direct, again, native = (
        whole(reduced(strategy, size, transport), size, strategy)
        for transport in ("point_to_point", "point_to_point", "native")
    )
    worst = max(
        float((native[name] - value).abs().max() / value.abs().max())
        for name, value in expected.items()
    )
    return {
        "exact": all(torch.equal(direct[name], value) for name, value in expected.items()),
        "repeats": all(torch.equal(direct[name], again[name]) for name in expected),
        "native": worst,
    }


def gather_in_place(size: int) -> dict[str, Any]:
    """Fill a buffer whose own slice is a view of it, and look at what else was allocated."""
    axis(size)
    if dist.get_rank() >= size:
        return {}
    ledger = MemoryLedger()
    booked: list[Any] = []
    ledger.subscribe(booked.append)
    streams = Streams(torch.device("cpu"))
    scratch = AllocatedScratch(TemporaryAllocator(streams, ledger))
    group = axis(size).get_group()
    communicator = PointToPointCommunicator(group, "inner", EventBus(), streams, scratch)
    full = torch.zeros(1 << 16)
    parts = full.tensor_split(size)
    own = parts[communicator.rank]
    own.fill_(communicator.rank + 1.0)
    address = full.data_ptr()
    with torch.profiler.profile(profile_memory=True) as profiled:
        communicator.all_gather(full, own, "bucket").wait()
    allocated = sum(max(0, event.self_cpu_memory_usage) for event in profiled.key_averages())
    return {
        "right": all(bool((part == r + 1.0).all()) for r, part in enumerate(parts)),
        "same_place": full.data_ptr() == address,
        "scratch": len(booked),
        "allocated_bytes": allocated,
    }


@pytest.mark.sample
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_direct_exchange_of_bf16_is_the_fp32_sum_in_rank_order_to_the_last_bit(
    ranks: RankPool, strategy: str, size: int
) -> None:
    found = ranks.run(compare, strategy, size)[:size]
    assert [one["exact"] for one in found] == [True] * size
    assert [one["repeats"] for one in found] == [True] * size
    if strategy == "no_shard" and size == 2:
        # One addition, rounded once by either.
        assert {one["native"] for one in found} == {0.0}
        return
    # Native gloo rounds partial sums to BF16: up to a unit roundoff of 2^-9 per addition.
    worst = max(one["native"] for one in found)
    assert 0 < worst < size * 2**-8


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.nightly), 4])
def test_a_gather_fills_its_buffer_in_place_and_needs_no_other_memory(
    ranks: RankPool, size: int
) -> None:
    assert size <= WORLD
    for found in ranks.run(gather_in_place, size)[:size]:
        assert found["right"]
        assert found["same_place"]
        assert found["scratch"] == 0
        # A few bytes of bookkeeping at most; the buffer has 262144.
        assert found["allocated_bytes"] < 4096
