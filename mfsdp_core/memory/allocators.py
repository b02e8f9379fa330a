"""Who hands out flat buffers, and what happens to their storage between uses.

Common rules: `acquire` is idempotent while the buffer is held, `release` of a buffer that is not
held does nothing, and the key names everything that shapes the buffer, so that a request for
another dtype or size can never be answered with an old buffer.
"""

from __future__ import annotations

import weakref
from contextlib import nullcontext
from typing import NamedTuple, Protocol, Self

import torch

from mfsdp_core.comm.torch_backend import torch_dtype
from mfsdp_core.memory.ledger import MemoryLedger
from mfsdp_core.plan.buffers import CATEGORY_OF_ROLE, Buffer, Role
from mfsdp_core.streams import Streams

#: Roles of lasting buffers that collectives read or write.
_COMMUNICATED: frozenset[Role] = frozenset(
    {
        "compute_weights",
        "compute_shard",
        "payload_shard",
        "accumulator",
        "grad_bucket",
        "outer_bucket",
    }
)


class BufferKey(NamedTuple):
    """Identity of a buffer: which bucket, in which role, of how many elements of which dtype.

    payload: which one of the encoded weights.
    """

    bucket: str
    role: Role
    elements: int
    dtype: torch.dtype
    payload: str = ""

    @classmethod
    def of(cls, bucket: str, row: Buffer) -> Self:
        """The key of a row of the bucket's table."""
        return cls(bucket, row.role, row.elements, torch_dtype(row.dtype), row.payload)

    @property
    def size_bytes(self) -> int:
        """Bytes of the storage."""
        return self.elements * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{self.role} of {self.bucket}"


class BucketAllocator(Protocol):
    """Hands out one-dimensional buffers whose contents are undefined.

    recycles: whether memory is used again, by the same buffer or another, while views of what was
    released may still exist. Such views must then be refilled in place, or never be read.
    """

    @property
    def recycles(self) -> bool:
        """See the class."""

    def has_room(self, key: BufferKey) -> bool:
        """Whether `acquire` would answer now with the buffer that `key` had before, or its first.

        False asks the caller to release something first; `acquire` may still succeed.
        """

    def acquire(self, key: BufferKey, *, in_place: bool = False) -> torch.Tensor:
        """The buffer of `key`, allocated if it is not held.

        in_place: views of what `key` had before are about to be read, so no other memory will do.
        """

    def release(self, key: BufferKey) -> None:
        """Give the storage back."""


class TemporaryAllocator:
    """A fresh tensor at every acquisition; nothing is kept after the release.

    Weights that autograd has saved views of live until it drops them, and stay on the ledger until
    then: between its forward and its backward pass a unit is then not free of them.
    """

    recycles = False

    def __init__(self, streams: Streams, ledger: MemoryLedger) -> None:
        self._streams = streams
        self._ledger = ledger
        self._held: dict[BufferKey, torch.Tensor] = {}

    def has_room(self, key: BufferKey) -> bool:
        """Always."""
        del key
        return True

    def acquire(self, key: BufferKey, *, in_place: bool = False) -> torch.Tensor:
        """The held tensor, or a new one."""
        del in_place
        held = self._held.get(key)
        if held is None:
            held = torch.empty(key.elements, dtype=key.dtype, device=self._streams.device)
            self._held[key] = held
            self._ledger.add(CATEGORY_OF_ROLE[key.role], held.nbytes, key.bucket, key.role)
            if key.role == "compute_weights":
                end = weakref.finalize(held.untyped_storage(), self._book_end, key)
                end.atexit = False
        return held

    def release(self, key: BufferKey) -> None:
        """Forget the tensor; its memory goes when its last view does."""
        memory = self._held.pop(key, None)
        if memory is not None and key.role != "compute_weights":
            category = CATEGORY_OF_ROLE[key.role]
            self._ledger.add(category, -memory.nbytes, key.bucket, key.role)

    def _book_end(self, key: BufferKey) -> None:
        self._ledger.add(CATEGORY_OF_ROLE[key.role], -key.size_bytes, key.bucket, key.role)


class _Resized:
    """A tensor of a `StorageResizeAllocator`, whose storage has `size_bytes` while it is held."""

    __slots__ = ("held", "size_bytes", "storage", "tensor")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.storage = tensor.untyped_storage()
        self.size_bytes = tensor.nbytes
        self.held = False


class StorageResizeAllocator:
    """One tensor object per key for ever; only its storage comes and goes.

    Autograd may have saved views of a parameter, and modules hold the parameter itself: both stay
    valid when the storage is refilled.
    """

    recycles = True

    def __init__(self, streams: Streams, ledger: MemoryLedger, *, lasts: bool = False) -> None:
        """lasts: what is acquired is not released while the model lives, apart from casts."""
        self._lasts = lasts
        self._streams = streams
        self._ledger = ledger
        self._resized: dict[BufferKey, _Resized] = {}

    def has_room(self, key: BufferKey) -> bool:
        """Always."""
        del key
        return True

    def acquire(self, key: BufferKey, *, in_place: bool = False) -> torch.Tensor:
        """The tensor of `key` with storage behind it."""
        del in_place
        resized = self._resized.get(key)
        if resized is None:
            stays = key.role in _COMMUNICATED and self._lasts
            with self._streams.communicated() if stays else nullcontext():
                tensor = torch.empty(key.elements, dtype=key.dtype, device=self._streams.device)
            resized = self._resized[key] = _Resized(tensor)
        elif not resized.held:
            resized.storage.resize_(resized.size_bytes)
        if not resized.held:
            resized.held = True
            self._ledger.add(CATEGORY_OF_ROLE[key.role], resized.size_bytes, key.bucket, key.role)
        return resized.tensor

    def release(self, key: BufferKey) -> None:
        """Free the storage; the tensor object and its views stay, without contents."""
        resized = self._resized.get(key)
        if resized is not None and resized.held:
            resized.held = False
            resized.storage.resize_(0)
            category = CATEGORY_OF_ROLE[key.role]
            self._ledger.add(category, -resized.size_bytes, key.bucket, key.role)


class PersistentAllocator(StorageResizeAllocator):
    """One tensor per key, allocated at its first acquisition and never freed."""

    def release(self, key: BufferKey) -> None:
        """Keep it."""


class AllocatedScratch:
    """`mfsdp_core.comm.protocol.Scratch` from a bucket allocator.

    At most one block per bucket, size and dtype is out at a time, as reductions of one bucket
    follow one another.
    """

    def __init__(self, allocator: BucketAllocator) -> None:
        self._allocator = allocator

    def acquire(self, bucket: str, elements: int, dtype: torch.dtype) -> torch.Tensor:
        """Memory for slices that arrive from other ranks."""
        return self._allocator.acquire(BufferKey(bucket, "peer_slices", elements, dtype))

    def release(self, bucket: str, memory: torch.Tensor) -> None:
        """Give it back."""
        self._allocator.release(BufferKey(bucket, "peer_slices", memory.numel(), memory.dtype))
