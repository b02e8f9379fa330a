"""Slots at run time: they never move, are never shared, and go back to the unit that had them."""

from __future__ import annotations

import pytest
import torch

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
