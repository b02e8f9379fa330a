"""A flat buffer with memory behind it, and who hands that out between uses."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Literal

import torch

from mfsdp_core.comm.torch_backend import torch_dtype
from mfsdp_core.memory.ledger import MemoryLedger
from mfsdp_core.plan.buffers import CATEGORY_OF_ROLE
from mfsdp_core.plan.layout import Layout
from mfsdp_core.plan.pools import Buffer
from mfsdp_core.streams import Streams

_NOTHING = torch.empty(0)


def carve(streams: Streams, rows: Sequence[Buffer]) -> list[torch.Tensor]:
    """Zeros for each row, out of one allocation, of registered memory where there is any.

    Such memory comes in segments that are not split: 20 MiB for what is larger than 1 MiB, up to
    10. None is a view, so that autograd counts the changes of each for itself.
    """
    sizes = [-(-row.size_bytes // 512) * 512 for row in rows]  # as the device's allocator does
    with streams.communicated():
        arena = torch.zeros(sum(sizes), dtype=torch.uint8, device=streams.device)
    parts = zip(arena.split(sizes), rows, strict=True)
    return [part[: row.size_bytes].view(torch_dtype(row.dtype)).data for part, row in parts]


class DBuffer:
    """A row of a bucket's table, and its memory while it is held; knows nothing of its use.

    data: [elements]; of a buffer that is not held what its allocator leaves.
    """

    def __init__(self, row: Buffer, allocator: Allocator, layout: Layout | None = None) -> None:
        self.row = row
        self.dtype = torch_dtype(row.dtype)
        self.elements, self.size_bytes = row.elements, row.size_bytes
        self.category = CATEGORY_OF_ROLE[row.role]
        self.allocator = allocator
        self.data = _NOTHING
        self.storage: torch.UntypedStorage | None = None
        self.held = False
        self._layout = layout

    def take(self, *, in_place: bool = False) -> torch.Tensor:
        """Memory, whose contents are undefined, unless it is held; `data`.

        in_place: views of what it had before are about to be read, so no other memory will do.
        """
        if not self.held:
            self.allocator.take(self, in_place=in_place)
            self.held = True
        return self.data

    def give(self) -> None:
        """Give the memory back, if it is held."""
        if self.held:
            self.allocator.give(self)

    def tensor(self, index: int) -> torch.Tensor:
        """View of tensor `index` in its own shape, in a buffer of all slices."""
        assert self._layout is not None
        slot, data = self._layout.slots[index], self.data
        # One operation of torch where a slice and its shape are two.
        return data.as_strided(slot.shape, slot.strides, data.storage_offset() + slot.offset)

    def zero_gaps(self) -> None:
        """Zero what belongs to no tensor."""
        assert self._layout is not None
        for start, end in self._layout.gaps:
            self.data[start:end].zero_()

    def part(self, slices: range) -> torch.Tensor:
        """View of some of its slices."""
        row, size = self.row, self.row.slice_elements
        if slices == row.slices:
            return self.data
        first = slices.start - row.slices.start
        return self.data[first * size : (first + len(slices)) * size]


class Allocator:
    """Memory of single buffers. leaves: what of it stays when a buffer gives it back.

    nothing: there is a fresh tensor at every `take`. Weights that autograd has saved views of live
    until it drops them, and stay on the ledger until then: between its forward and its backward
    pass a unit is then not free of them. tensor: the one object stays, and only its storage comes
    and goes, so that views which autograd has saved, and the parameter itself, are valid when it is
    refilled. A buffer that was carved has its tensor, and keeps it. memory: it is never freed.

    recycles: whether memory is used again, by the same buffer or another, while views of what was
    given back may still exist. Such views must then be refilled in place, or never be read.
    """

    def __init__(
        self,
        streams: Streams,
        ledger: MemoryLedger,
        leaves: Literal["nothing", "tensor", "memory"] = "nothing",
        *,
        on_host: bool = False,
    ) -> None:
        self._ledger = ledger.host if on_host else ledger
        self.leaves = leaves
        self.recycles = leaves != "nothing"
        self._streams = streams
        self._on_host = on_host

    def has_room(self, buffer: DBuffer) -> bool:
        """Whether `take` would answer now with the memory that the buffer had before, or its first.

        False asks the caller to give something back first; `take` may still succeed.
        """
        del buffer
        return True

    def take(self, buffer: DBuffer, *, in_place: bool = False) -> None:
        """Put memory behind a buffer; see `DBuffer.take`."""
        del in_place
        elements, dtype, row = buffer.elements, buffer.dtype, buffer.row
        self._ledger.add(buffer.category, buffer.size_bytes, row.bucket, row.role)
        if buffer.storage is not None:
            buffer.storage.resize_(buffer.size_bytes)
        elif buffer.data is _NOTHING:
            if self._on_host:
                buffer.data = self._streams.host_memory(elements, dtype)
            else:
                buffer.data = torch.empty(elements, dtype=dtype, device=self._streams.device)
            storage = buffer.data.untyped_storage()
            if self.recycles:
                buffer.storage = storage
            elif row.role == "compute_weights":
                booking = (buffer.category, -buffer.size_bytes, row.bucket, row.role)
                end = weakref.finalize(storage, self._ledger.add, *booking)
                end.atexit = False

    def give(self, buffer: DBuffer) -> None:
        """Forget the tensor, whose memory goes when its last view does, or free its storage."""
        if self.leaves == "memory":
            return
        buffer.held, row = False, buffer.row
        if not self.recycles:
            buffer.data = _NOTHING
        else:
            assert buffer.storage is not None
            buffer.storage.resize_(0)
        if self.recycles or row.role != "compute_weights":
            self._ledger.add(buffer.category, -buffer.size_bytes, row.bucket, row.role)
