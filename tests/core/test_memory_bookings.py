"""The ledger says who holds what, and tells whoever asks; nobody asks for nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from mfsdp_core.memory.allocators import (
    BufferKey,
    PersistentAllocator,
    StorageResizeAllocator,
    TemporaryAllocator,
)
from mfsdp_core.memory.ledger import POOL, Booking, MemoryLedger
from mfsdp_core.memory.pools import SlotPool
from mfsdp_core.plan.pools import BucketRequest, plan_pool
from mfsdp_core.streams import Streams

CPU = Streams(torch.device("cpu"))
KEY = BufferKey("layers.0/0", "grad_bucket", 6, torch.float32)


def watched() -> tuple[MemoryLedger, list[Booking], Callable[[], None]]:
    ledger = MemoryLedger()
    seen: list[Booking] = []
    return ledger, seen, ledger.subscribe(seen.append)


@pytest.mark.parametrize("kind", [TemporaryAllocator, StorageResizeAllocator])
def test_every_acquisition_and_release_is_booked_under_the_buffers_name(kind: Any) -> None:
    ledger, seen, _ = watched()
    allocator = kind(CPU, ledger)
    allocator.acquire(KEY)
    allocator.acquire(KEY)
    assert [b.bucket for b in ledger.alive()] == ["layers.0/0"]
    allocator.release(KEY)
    taken = Booking("communication_buffers", 24, "layers.0/0", "grad_bucket")
    given = Booking("communication_buffers", -24, "layers.0/0", "grad_bucket")
    assert seen == [taken, given]
    assert ledger.alive() == []


def test_a_persistent_buffer_stays_alive() -> None:
    ledger, seen, _ = watched()
    allocator = PersistentAllocator(CPU, ledger)
    allocator.acquire(KEY)
    allocator.release(KEY)
    assert [b.count_bytes for b in seen] == [24]
    assert [b.bucket for b in ledger.alive()] == ["layers.0/0"]


def test_a_pool_is_booked_once_and_its_slots_are_noted_while_a_unit_uses_them() -> None:
    ledger, seen, _ = watched()
    requests = [BucketRequest(u, f"{u}/0", "float32", n, 4) for u, n in (("a", 6), ("b", 4))]
    fallback = StorageResizeAllocator(CPU, ledger)
    plan = plan_pool("max_pool", requests, 2)
    pool = SlotPool("grad_bucket", plan, fallback, streams=CPU, ledger=ledger)
    key = BufferKey("b/0", "grad_bucket", 4, torch.float32)
    pool.acquire(key)
    assert ledger.bytes_by_category()["communication_buffers"] == 2 * 24
    assert [(b.bucket, b.count_bytes, b.in_pool) for b in ledger.alive()] == [
        (POOL, 48, False),
        ("b/0", 16, True),
    ]
    pool.release(key)
    pool.release(key)
    assert [(b.bucket, b.count_bytes) for b in seen] == [(POOL, 48), ("b/0", 16), ("b/0", -16)]
    assert ledger.peak_bytes == 48


def test_who_has_left_is_told_nothing() -> None:
    ledger, seen, leave = watched()
    assert ledger.is_watched
    leave()
    leave()
    assert not ledger.is_watched
    StorageResizeAllocator(CPU, ledger).acquire(KEY)
    assert seen == []
