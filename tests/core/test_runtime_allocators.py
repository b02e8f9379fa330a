"""Every allocator computes the same to the last bit, in different memory that stays put."""

from __future__ import annotations

import resource
from typing import Any

import pytest
import torch

from conformance.judging import same
from mfsdp_core import MixedPrecisionPolicy
from mfsdp_core.errors import PoolExhaustedError
from mfsdp_core.events import Event
from oracle.hybrid import hybrid
from oracle.models import batch, loss
from oracle.sharded import Sharded, shard

pytestmark = pytest.mark.on_ranks

NAME = "unequal_units"
ALLOCATORS = ("temporary", "storage_resize", "fixed_pool", "max_pool")
BF16_COMM = MixedPrecisionPolicy(grad_comm_dtype=torch.bfloat16)


@pytest.mark.parametrize(("allocator", "is_hybrid"), [("fixed_pool", False), ("max_pool", True)])
def test_slots_keep_their_addresses_over_steps_with_accumulation(
    allocator: str, is_hybrid: bool
) -> None:
    if is_hybrid:
        policy = {"dtype": torch.float32, "mixed_precision_policy": BF16_COMM}
        toy: Sharded = hybrid(
            "optim_grads_params", "optim", name=NAME, allocator=allocator, **policy
        )
    else:
        toy = shard(NAME, 3, 2, allocator=allocator)
    pools = toy.model._context.allocators.pools

    def pointers() -> list[Any]:
        return [[area.data_ptr() for area in pool._areas] for pool in pools.values()]

    start, found = pointers(), []
    # Of the first bucket of every unit.
    seen: dict[str, set[int]] = {}
    groups = {g.plan.name: g for u in toy.model._context.units for g in u.buckets}
    units = toy.model.pool_plan["units"]
    served = {u["bucket"]: u["placement"] == "pool" for u in units}

    def follow(event: Event) -> None:
        if event.operation == "reduce_scatter":
            found.append(pointers())
        if event.kind == "materialise" and served[event.bucket]:
            data = groups[event.bucket].weights.full.data
            seen.setdefault(event.bucket, set()).add(data.data_ptr())

    toy.model.events.subscribe(follow)
    toy.trained(4)
    assert found
    assert any(seen.values())
    assert all(one == start for one in found)
    assert sorted(pools) == [
        "compute_weights",
        "grad_bucket",
        *(["outer_bucket"] if is_hybrid else []),
    ]
    assert {
        bucket: len(addresses) for bucket, addresses in seen.items() if len(addresses) > 1
    } == {}


@pytest.mark.parametrize("comm", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("strategy", ["no_shard", "optim"])
def test_no_communication_buffer_exists_where_no_dtype_changes(
    strategy: str, comm: torch.dtype
) -> None:
    policy = MixedPrecisionPolicy(torch.float32, torch.float32, comm, reduce_dtype=comm)
    # Direct exchange needs memory for what arrives, whatever the dtypes.
    toy = shard(NAME, strategy, 2, mixed_precision_policy=policy, transport="native")
    toy.trained(2)
    peak = toy.model.ledger.peak_bytes_by_category()["communication_buffers"]
    assert (peak > 0) == (comm is torch.bfloat16), peak


def test_a_gradient_pool_of_open_buckets_is_exhausted_with_their_names() -> None:
    """All units stay open, since the one that ran last in the first pass runs first."""
    toy = shard("linear_stack", 2, 2, allocator="max_pool")
    toy.run_cycle(1)
    model = toy.model
    model.zero_grad()
    blocks = model.module.blocks
    order = [blocks[2], blocks[0], blocks[1]]
    model.module.forward = lambda x: model.module.head(order[2](order[1](order[0](x))))
    value = loss(model(batch("linear_stack", 0, 0, torch.float32)))
    with pytest.raises(PoolExhaustedError) as caught:
        value.backward()
    said = str(caught.value)
    assert "grad_bucket pool of 2 slots: bucket blocks.2/" in said
    assert "slot 0: unit blocks.0, slot 1: unit blocks.1; idle slots: none" in said


@pytest.mark.parametrize(
    ("arguments", "most"),
    [
        ({"prefetch_order": "static"}, 2),
        # Not the order in which they run: weights arrive too late or stay too long, but are right.
        ({"prefetch_order": [f"blocks.{p}" for p in (1, 0, 3, 2, 5, 4)]}, 6),
        ({"prefetch_budget_bytes": 0}, 2),
        ({"prefetch_budget_bytes": 1 << 20}, 6),
        ({"prefetch_budget_bytes": 1 << 20, "allocator": "max_pool", "pool_slots": 3}, 3),
        ({"prefetch_budget_bytes": 1 << 20, "allocator": "max_pool"}, 2),
    ],
)
def test_allocators_order_and_budget_of_prefetching_change_memory_and_no_bit(
    arguments: dict[str, Any], most: int
) -> None:
    """most: units resident at once."""
    plain = shard(NAME, 3, 2).trained(2)
    toy = shard(NAME, 3, 2, **arguments)
    held: set[str] = set()
    counts = []

    def follow(event: Event) -> None:
        unit = event.bucket.rpartition("/")[0]
        if event.kind == "materialise" and unit != "(root)":
            held.add(unit)
        elif event.kind == "release":
            held.discard(unit)
        counts.append(len(held))

    toy.model.events.subscribe(follow)
    same("losses and weights", toy.trained(2), plain)
    assert max(counts) <= most, counts


def test_building_touches_no_memory_that_it_does_not_use() -> None:
    """Pages that the kernel hands out to a second small model while torch fills what it makes."""
    pages_of_32_mb = 8192
    shard(NAME, 3, 2)
    was = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        shard(NAME, 3, 2)
        pages = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    finally:
        torch.use_deterministic_algorithms(was)
    assert pages < pages_of_32_mb / 2, pages
