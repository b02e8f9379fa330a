"""The outer stage of a hybrid reduction: once per cycle, after the inner stage has landed.

Its input is what the inner stage has accumulated on this rank, PARTIAL along the outer axis. It is
never scaled again, and its result always replaces the input (see `Landing`). Where the outer axis
shards the optimizer, only this rank's sub-shard is valid afterwards.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mfsdp_core.comm.protocol import Communicator, PendingSum
from mfsdp_core.memory.allocators import BucketAllocator, BufferKey
from mfsdp_core.plan.strategy import AxisPlacements, Collective
from mfsdp_core.shard.flat_buffer import part


@dataclass(frozen=True)
class _Flight:
    own: torch.Tensor
    work: PendingSum
    key: BufferKey | None


class OuterReduction:
    """Reduces `accumulated` in place over the outer axis. own: the part the optimizer is handed."""

    def __init__(
        self,
        bucket: str,
        accumulated: torch.Tensor,
        axis: AxisPlacements,
        communicator: Communicator,
        allocator: BucketAllocator,
        *,
        average: bool,
    ) -> None:
        self._bucket = bucket
        self._accumulated = accumulated
        self._scatters = axis.reduction is Collective.REDUCE_SCATTER
        self._communicator = communicator
        self._allocator = allocator
        self._average = average
        self._flight: _Flight | None = None
        self.issued = False
        self.own = self._own(accumulated)

    @property
    def is_live(self) -> bool:
        """Whether a reduction is under way."""
        return self._flight is not None

    def issue(self, key: BufferKey | None, total: torch.dtype) -> None:
        """Start the reduction. key: of a bucket in the dtype of the wire; None: no cast."""
        data = self._accumulated
        if key is not None:
            data = self._allocator.acquire(key).copy_(self._accumulated)
        own = self._own(data)
        name, average, by = self._bucket, self._average, self._communicator
        if self._scatters:
            work = by.reduce_scatter(own, data, name, average=average, total=total)
        else:
            work = by.all_reduce(data, name, average=average, total=total)
        self._flight = _Flight(own, work, key)
        self.issued = True

    def land(self) -> None:
        """Wait for the reduction under way and put its result where the optimizer looks."""
        flight = self._flight
        if flight is None:
            return
        result = flight.work.wait()
        if flight.key is not None or result is not flight.own:
            self.own.copy_(result)
        if flight.key is not None:
            self._allocator.release(flight.key)
        self._flight = None

    def reset(self) -> None:
        """Begin a new cycle."""
        self.land()
        self.issued = False

    def _own(self, data: torch.Tensor) -> torch.Tensor:
        if not self._scatters:
            return data
        return part(data, self._communicator.rank, self._communicator.size)
