"""Slots at run time: they never move, are never shared, and go back to the unit that had them."""

from __future__ import annotations

import pytest
import torch

from mfsdp_core.errors import PoolExhaustedError
from mfsdp_core.memory.allocators import (
    BufferKey,
    PersistentAllocator,
    StorageResizeAllocator,
    TemporaryAllocator,
)
from mfsdp_core.memory.ledger import MemoryLedger
from mfsdp_core.memory.pools import SlotPool
from mfsdp_core.plan.pools import BucketRequest, plan_pool
from mfsdp_core.streams import Streams

CPU = Streams(torch.device("cpu"))


def key(unit: str, elements: int, bucket: int = 0, dtype: torch.dtype = torch.float32) -> BufferKey:
    return BufferKey(f"{unit}/{bucket}", "compute_weights", elements, dtype)


def pool(sizes: dict[str, int], slots: int = 2, kind="max_pool", persistent: bool = False):
    """A pool for units of one fp32 bucket each, and the ledger that it books on."""
    ledger = MemoryLedger()
    requests = [BucketRequest(u, f"{u}/0", "float32", n, 4) for u, n in sizes.items()]
    fallback = (PersistentAllocator if persistent else StorageResizeAllocator)(CPU, ledger)
    plan = plan_pool(kind, requests, slots)
    return SlotPool("compute_weights", plan, fallback, streams=CPU, ledger=ledger), ledger


def test_all_slots_exist_from_the_start_and_hold_finite_numbers():
    allocator, ledger = pool({"a": 4, "b": 9, "c": 5})
    assert ledger.bytes_by_category()["compute_weights"] == 2 * 9 * 4
    assert allocator.acquire(key("a", 4)).tolist() == [0.0] * 4
    assert ledger.bytes_by_category()["compute_weights"] == 2 * 9 * 4


def test_a_unit_gets_the_slot_it_had():
    allocator, _ = pool({"a": 4, "b": 9, "c": 5})
    first = allocator.acquire(key("a", 4))
    allocator.acquire(key("b", 9))
    allocator.release(key("a", 4))
    allocator.acquire(key("c", 5))
    allocator.release(key("b", 9))
    allocator.release(key("c", 5))
    again = allocator.acquire(key("a", 4))
    assert again is first
    assert again.data_ptr() == first.data_ptr()


def test_acquiring_twice_is_acquiring_once_and_releasing_the_unheld_is_nothing():
    allocator, _ = pool({"a": 4, "b": 9})
    allocator.release(key("a", 4))
    assert allocator.acquire(key("a", 4)) is allocator.acquire(key("a", 4))
    allocator.release(key("a", 4))
    assert allocator.holders() == {}


def test_a_slot_that_is_taken_is_replaced_with_a_warning_that_names_both_units():
    allocator, _ = pool({"a": 4, "b": 4, "c": 4}, slots=2)
    for unit in ("a", "c"):
        allocator.acquire(key(unit, 4))
        allocator.release(key(unit, 4))
    allocator.acquire(key("a", 4))
    with pytest.warns(RuntimeWarning, match=r"unit c had slot 0, which unit a holds; .* slot 1"):
        moved = allocator.acquire(key("c", 4))
    allocator.release(key("a", 4))
    allocator.release(key("c", 4))
    assert allocator.acquire(key("c", 4)) is moved


def test_where_views_are_about_to_be_read_another_slot_is_refused():
    allocator, _ = pool({"a": 4, "b": 4, "c": 4}, slots=2)
    for unit in ("a", "c"):
        allocator.acquire(key(unit, 4))
        allocator.release(key(unit, 4))
    allocator.acquire(key("a", 4))
    with pytest.raises(PoolExhaustedError, match=r"only slot 0 will do.*slot 0: unit a.*slot 1"):
        allocator.acquire(key("c", 4), in_place=True)


def test_exhaustion_names_the_bucket_the_unit_the_holders_and_the_idle_slots():
    allocator, _ = pool({"a": 4, "b": 4, "c": 4})
    allocator.acquire(key("a", 4))
    allocator.acquire(key("b", 4))
    assert not allocator.has_room(key("c", 4))
    message = r"2 slots: bucket c/0 of unit c .*slot 0: unit a, slot 1: unit b; idle slots: none"
    with pytest.raises(PoolExhaustedError, match=message):
        allocator.acquire(key("c", 4))


def test_a_slot_is_idle_only_when_all_buckets_of_its_unit_are():
    ledger = MemoryLedger()
    requests = [
        BucketRequest(u, f"{u}/{b}", "float32", 4 + b, 4) for u in ("a", "b") for b in (0, 1)
    ]
    plan = plan_pool("max_pool", requests, 2)
    allocator = SlotPool(
        "compute_weights",
        plan,
        StorageResizeAllocator(CPU, ledger),
        streams=CPU,
        ledger=ledger,
    )
    small, large = allocator.acquire(key("a", 4, 0)), allocator.acquire(key("a", 5, 1))
    small.fill_(1)
    large.fill_(2)
    assert small.tolist() == [1.0] * 4
    allocator.release(key("a", 4, 0))
    assert allocator.holders() == {0: "a"}
    allocator.release(key("a", 5, 1))
    assert allocator.holders() == {}


@pytest.mark.parametrize("persistent", [False, True])
def test_what_no_slot_serves_keeps_its_tensor_and_its_views(persistent):
    allocator, ledger = pool({"a": 4, "b": 4, "odd": 7}, kind="fixed_pool", persistent=persistent)
    at_rest = ledger.bytes_by_category()["compute_weights"]
    tensor = allocator.acquire(key("odd", 7))
    view = tensor[2:5]
    allocator.release(key("odd", 7))
    kept = ledger.bytes_by_category()["compute_weights"] - at_rest
    assert kept == (7 * 4 if persistent else 0)
    again = allocator.acquire(key("odd", 7)).fill_(3)
    assert again is tensor
    assert view.tolist() == [3.0] * 3


def test_another_dtype_or_size_is_never_answered_with_a_planned_area():
    allocator, _ = pool({"a": 4, "b": 4})
    planned = allocator.acquire(key("a", 4))
    for other in (key("a", 2), key("a", 4, dtype=torch.float64)):
        assert not allocator.serves(other)
        found = allocator.acquire(other)
        assert (found.numel(), found.dtype) == (other.elements, other.dtype)
        assert found.untyped_storage().data_ptr() != planned.untyped_storage().data_ptr()


def test_temporary_weights_stay_on_the_ledger_until_their_last_view_is_gone():
    ledger = MemoryLedger()
    allocator = TemporaryAllocator(CPU, ledger)
    view = allocator.acquire(key("a", 4))[1:3]
    allocator.release(key("a", 4))
    assert ledger.bytes_by_category()["compute_weights"] == 16
    del view
    assert ledger.bytes_by_category()["compute_weights"] == 0
