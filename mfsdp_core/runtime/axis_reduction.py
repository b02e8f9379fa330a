"""The reduction of one bucket's gradients along one mesh axis.

Along the inner axis it runs on every microbatch or once per cycle, as the placements say. Along the
outer axis of hybrid sharding it runs once per cycle, after the inner one has landed: its input is
what that has accumulated on this rank, PARTIAL along the outer axis, and is never scaled again; its
result always replaces the input (see `Landing`). Where an axis shards the gradient, only this
rank's part is valid afterwards.
"""

from __future__ import annotations

import torch

from mfsdp_core.comm.protocol import PendingSum
from mfsdp_core.comm.torch_backend import Communicator
from mfsdp_core.memory.allocators import BucketAllocator, BufferKey
from mfsdp_core.plan.strategy import AxisPlacements, Collective
from mfsdp_core.shard.flat_buffer import part


class AxisReduction:
    """Reduces into `own`, the part of an accumulator that is valid afterwards; one at a time.

    flight: what is under way: this rank's part of what was sent, the collective, and the key of the
    memory.
    """

    def __init__(
        self,
        bucket: str,
        axis: AxisPlacements,
        communicator: Communicator,
        allocator: BucketAllocator,
        *,
        average: bool,
    ) -> None:
        self._bucket = bucket
        self._scatters = axis.reduction is Collective.REDUCE_SCATTER
        self._communicator = communicator
        self._allocator = allocator
        self._average = average
        self._cuts = self._scatters and not axis.reduces_every_microbatch
        self.flight: tuple[torch.Tensor, PendingSum, BufferKey | None] | None = None
        self.own: torch.Tensor

    def into(self, accumulated: torch.Tensor) -> torch.Tensor:
        """From now on reduce into `accumulated`; returns the part of it that is `own`."""
        by = self._communicator
        self.own = part(accumulated, by.rank, by.size) if self._cuts else accumulated
        elements = self.own.numel()
        self._part = slice(by.rank * elements, (by.rank + 1) * elements)
        return self.own

    def leave(self) -> None:
        """Let go of the accumulator; `into` comes before the next reduction."""
        del self.own

    def issue(
        self, data: torch.Tensor, key: BufferKey | None, total: torch.dtype, *, adds: bool = False
    ) -> None:
        """Start to reduce `data`, which is scaled; total: the dtype in which it is added up.

        key: of its memory, given back when the result has landed; None: it is the accumulator.
        adds: see `land`. A result that is not added goes where it belongs, which saves a copy of
        it, unless the transport cannot.
        """
        own = into = data[self._part] if self._scatters else data
        name, average, by = self._bucket, self._average, self._communicator
        if self._scatters:
            if not adds and by.reduces_into(total, self.own.dtype):
                into = self.own
            work = by.reduce_scatter(into, data, name, average=average, total=total)
        else:
            work = by.all_reduce(data, name, average=average, total=total)
        self.flight = own, work, key

    def land(self, *, adds: bool = False) -> None:
        """Wait for what is under way; its result replaces what is in `own`, or is added to it."""
        if self.flight is None:
            return
        own, work, key = self.flight
        result = work.wait()
        if adds:
            self.own.add_(result)
        elif result is not self.own and (key is not None or result is not own):
            self.own.copy_(result)
        self.flight = None
        if key is not None:
            self._allocator.release(key)
