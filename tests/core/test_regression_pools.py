"""R6 and R12: pools of a model whose units differ and whose embedding is used again at the end."""

from __future__ import annotations

import pytest
import torch

from mfsdp_core.events import Event
from oracle.ranks import RankPool
from oracle.reference import expected_gradient, relative_difference
from oracle.sharded import shard

pytestmark = pytest.mark.processes

NAME = "unequal_units"


def prefetched_units(allocator: str) -> tuple[float, list[str]]:
    """Gradient error of the second of two cycles, and the units gathered ahead in it, in order."""
    toy = shard(NAME, "optim_grads_params", 2, torch.float64, allocator=allocator)
    seen: list[str] = []
    buckets: list[str] = []

    def follow(event: Event) -> None:
        if event.kind != "prefetch":
            return
        unit = event.bucket.rpartition("/")[0]
        # A unit's buckets come one after another, in order; the first one again is a new gather.
        if seen[-1:] != [unit] or event.bucket <= buckets[-1]:
            seen.append(unit)
        buckets.append(event.bucket)

    toy.model.events.subscribe(follow)
    for cycle in range(2):
        toy.model.zero_grad_buffer()
        seen.clear()
        toy.run_cycle(1, cycle=cycle)
    expected = expected_gradient(NAME, 2, 1, torch.float64, 1)
    return relative_difference(toy.full_gradient(), expected), seen


def fallback_storages() -> tuple[float, bool, set[str]]:
    """Gradient error over two cycles; whether weights without a slot kept theirs; those units."""
    toy = shard(NAME, "optim_grads_params", 2, torch.float64, allocator="fixed_pool")
    plan = toy.model.pool_plan["units"]
    outside = {u["unit"] for u in plan if u["placement"] == "storage_resize"}
    units = {unit.name: unit for unit in toy.model._context.units}
    raws = [m.raw for name in sorted(outside) for g in units[name].groups for m in g.parameters]
    storages = [raw.untyped_storage()._cdata for raw in raws]
    error = 0.0
    for cycle in range(2):
        toy.model.zero_grad_buffer()
        toy.run_cycle(2, cycle=cycle)
        expected = expected_gradient(NAME, 2, 2, torch.float64, cycle)
        error = max(error, relative_difference(toy.full_gradient(), expected))
    return error, storages == [raw.untyped_storage()._cdata for raw in raws], outside


def test_r6_the_root_takes_no_slot_of_a_pool_for_a_unit_ahead(ranks: RankPool) -> None:
    forward = [f"blocks.{index}" for index in range(1, 6)]
    backward = [f"blocks.{index}" for index in range(4, -1, -1)]
    for error, units in ranks.run(prefetched_units, "max_pool"):
        assert error < 1e-12
        assert units == [*forward, *backward]


def test_without_a_pool_the_root_gathers_the_first_and_the_last_unit_ahead(
    ranks: RankPool,
) -> None:
    for error, units in ranks.run(prefetched_units, "storage_resize"):
        assert error < 1e-12
        assert units == [
            *(f"blocks.{p}" for p in range(6)),
            *(f"blocks.{p}" for p in range(5, -1, -1)),
        ]


def test_r12_units_that_no_slot_serves_keep_their_storage_and_their_gradients(
    ranks: RankPool,
) -> None:
    for error, same, outside in ranks.run(fallback_storages):
        assert outside == {"blocks.0", "blocks.2", "blocks.4"}
        assert error < 1e-12
        assert same
