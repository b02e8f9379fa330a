"""A gather by direct exchange fills the buffer that its own slice is a view of."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from mfsdp_core.comm.point_to_point import PointToPointCommunicator
from mfsdp_core.events import EventBus
from mfsdp_core.memory.allocators import AllocatedScratch, TemporaryAllocator
from mfsdp_core.memory.ledger import MemoryLedger
from mfsdp_core.streams import Streams
from oracle.ranks import WORLD

pytestmark = pytest.mark.on_ranks


@cache
def axis(size: int) -> DeviceMesh:
    """A mesh over the first `size` ranks; every rank has to call this, members or not."""
    return DeviceMesh("cpu", list(range(size)), mesh_dim_names=("dp",))


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.nightly), 4])
def test_a_gather_fills_its_buffer_in_place_and_needs_no_other_memory(size: int) -> None:
    """The own slice is a view of the buffer."""
    assert size <= WORLD
    axis(size)
    if dist.get_rank() >= size:
        return
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
    assert all(bool((part == r + 1.0).all()) for r, part in enumerate(parts)), full
    assert full.data_ptr() == address
    assert not booked
    # A few bytes of bookkeeping at most; the buffer has 262144.
    allocated = sum(max(0, event.self_cpu_memory_usage) for event in profiled.key_averages())
    assert allocated < 4096
