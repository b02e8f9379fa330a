"""Scratch memory of transports, booked like every other buffer."""

from __future__ import annotations

import torch

from mfsdp_core.memory.allocators import BucketAllocator, BufferKey


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
