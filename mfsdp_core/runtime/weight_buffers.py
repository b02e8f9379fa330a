"""Weights of one bucket: the compute copy that runs, the main copy that is optimized.

[Note: one copy] Where main and compute weights have the same dtype they share storage. The main
weights are then this rank's part of the *source*, the buffer that inner gathers read:

    parameter    optimizer    source                     main weights
    REPLICATE    REPLICATE    the full compute buffer    all of it
    REPLICATE    FLAT         own slice of it            all of the slice, or its outer sub-shard
    FLAT         FLAT         a shard of its own         all of the shard, or its outer sub-shard

[Note: cast when gathered] Weights that come and go, in another dtype than their main weights, need
no shard in the compute dtype between gathers: the main weights are cast into this rank's part of
the full buffer, from where it is sent. Only where the outer axis shards the optimizer does a shard
of its own collect the outer sub-shards.

Residency of the compute weights:

    EMPTY ---------issue-------> COMMUNICATING --complete--> READY
    READY ---------release-----> EMPTY           (persistent buckets stay READY)
    READY ---------invalidate--> PRESERVED       storage is there, the contents are of last step
    PRESERVED -----issue-------> COMMUNICATING   refreshed in place

Where the outer axis shards the optimizer, the source is refreshed from the outer sub-shards before
the first inner gather that follows an update: once per cycle and bucket, in any microbatch.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Literal

import torch

from mfsdp_core.comm.axes import AxisCommunicators
from mfsdp_core.comm.protocol import Pending
from mfsdp_core.comm.torch_backend import dtype_name
from mfsdp_core.errors import LifecycleError
from mfsdp_core.events import Event, EventBus
from mfsdp_core.memory.allocation import Allocators
from mfsdp_core.memory.allocators import BufferKey, Role
from mfsdp_core.plan.strategy import Collective
from mfsdp_core.runtime.bucket import BucketSpec
from mfsdp_core.shard.flat_buffer import FullBuffer, part

_NO_BACKWARD = -1


class Residency(Enum):
    """Where a bucket's compute weights are."""

    EMPTY = "empty"
    COMMUNICATING = "communicating"
    READY = "ready"
    PRESERVED = "preserved"


_TRANSITIONS: dict[tuple[Residency, str], Residency] = {
    (Residency.EMPTY, "issue"): Residency.COMMUNICATING,
    (Residency.PRESERVED, "issue"): Residency.COMMUNICATING,
    (Residency.COMMUNICATING, "complete"): Residency.READY,
    (Residency.READY, "release"): Residency.EMPTY,
    (Residency.PRESERVED, "release"): Residency.EMPTY,
    (Residency.READY, "invalidate"): Residency.PRESERVED,
    (Residency.PRESERVED, "invalidate"): Residency.PRESERVED,
    (Residency.EMPTY, "invalidate"): Residency.EMPTY,
}


class WeightBuffers:
    """Storage, gathering and installation of one bucket's weights."""

    def __init__(
        self,
        spec: BucketSpec,
        communicators: AxisCommunicators,
        allocators: Allocators,
        *,
        persistent: bool,
        events: EventBus,
    ) -> None:
        self._spec = spec
        self._gather = communicators.gather
        self.role = communicators.gather.role
        self._outer = communicators.outer
        self._persistent = persistent or not spec.strategy.inner.gathers_every_use
        self._lasting = allocators.lasting
        self._allocator = allocators.lasting if self._persistent else allocators.weights
        inner, outer = spec.strategy.inner, spec.strategy.outer
        self._casts_when_gathered = (
            inner.gathers_every_use
            and not spec.dtypes.shares_weights
            and not outer.shards_optimizer
        )
        self._events = events
        self._work: Pending | None = None
        self._outer_stale = False
        self.state = Residency.READY
        self._full_key = BufferKey(
            spec.name, "compute_weights", spec.layout.total_elements, spec.dtypes.compute
        )
        self.full = FullBuffer(spec.layout, self._allocator.acquire(self._full_key))
        self._nothing = self.full.data[:0].clone()
        # Called when the full buffer has another tensor behind it, None when it has none.
        self.on_move: Callable[[FullBuffer | None], None] | None = None
        self.full.zero_gaps()

    @property
    def full_bytes(self) -> int:
        """Bytes of the full buffer."""
        return self._full_key.size_bytes

    @property
    def is_gathered(self) -> bool:
        """Whether the compute weights are there or under way."""
        return self.state in (Residency.READY, Residency.COMMUNICATING)

    def adopt(self) -> None:
        """Make the source and main copies from the full buffer, which the caller has filled."""
        inner, outer = self._spec.strategy.inner, self._spec.strategy.outer
        dtypes, coordinate = self._spec.dtypes, self._spec.coordinate
        own = self._own_part()
        if inner.gathers_every_use and not self._casts_when_gathered:
            is_main = dtypes.shares_weights and not outer.shards_optimizer
            role: Role = "main_weights" if is_main else "compute_shard"
            key = BufferKey(self._spec.name, role, own.numel(), dtypes.compute)
            own = self._lasting.acquire(key).copy_(own)
        self._source = own if inner.shards_optimizer else self.full.data
        self._owned = self._source
        if outer.shards_optimizer:
            self._owned = part(self._source, coordinate.outer_rank, coordinate.outer_size)
        self.main = self._owned
        if not dtypes.shares_weights:
            elements = self._owned.numel()
            key = BufferKey(self._spec.name, "main_weights", elements, dtypes.main_params)
            self.main = self._lasting.acquire(key).copy_(self._owned)
        if self._casts_when_gathered:
            # A view would keep the memory of an allocator that frees tensors.
            self._source = self._owned = self._nothing
        if not self._persistent:
            self._enter("release")
            self._free()

    def issue(self) -> bool:
        """Start gathering unless the weights are there or under way; whether it was started."""
        if self.state in (Residency.READY, Residency.COMMUNICATING):
            return False
        if self.state is Residency.EMPTY:
            self._allocate()
            self._publish("materialise")
        self._enter("issue")
        if self._outer_stale and self._outer is not None:
            self._outer.all_gather(self._source, self._owned, self._spec.name).wait()
            self._outer_stale = False
        source = self._source
        if self._casts_when_gathered:
            source = self._own_part().copy_(self.main)
        self._work = self._gather.all_gather(self.full.data, source, self._spec.name)
        return True

    def wait(self) -> None:
        """Return once compute weights may be read; gathers them if nobody asked before."""
        self.issue()
        self.complete()

    def complete(self) -> None:
        """Wait for the gather under way, if there is one."""
        if self._work is not None:
            self._work.wait()
            self._work = None
            self._enter("complete")

    def release(self) -> None:
        """Free the full buffer, unless this bucket stays materialised."""
        self.complete()
        if self._persistent or self.state is Residency.EMPTY:
            return
        self._enter("release")
        self._free()
        self._publish("release")

    def install(self) -> None:
        """Bring updated main weights into the compute copy; other ranks' parts become stale."""
        self.complete()
        if not self._spec.dtypes.shares_weights and not self._casts_when_gathered:
            self._owned.copy_(self.main)
        strategy = self._spec.strategy
        self._outer_stale = strategy.outer.weight_refresh is Collective.ALL_GATHER
        if strategy.inner.weight_refresh is Collective.ALL_GATHER:
            self._enter("invalidate")

    def broadcast(self) -> None:
        """Replace replicated main weights by those of the first rank that has them."""
        strategy = self._spec.strategy
        if self._outer is not None and not strategy.outer.shards_optimizer:
            self._outer.broadcast(self.main, self._spec.name).wait()
        if not strategy.inner.shards_optimizer:
            self._gather.broadcast(self.main, self._spec.name).wait()
        self.install()

    def _own_part(self) -> torch.Tensor:
        """This rank's part of the full buffer."""
        coordinate = self._spec.coordinate
        return part(self.full.data, coordinate.inner_rank, coordinate.inner_size)

    def _allocate(self) -> None:
        """Storage for the full buffer; in a backward pass, where the forward pass had it."""
        in_backward = torch._C._current_graph_task_id() != _NO_BACKWARD
        data = self._allocator.acquire(self._full_key, in_place=in_backward)
        if data is not self.full.data:
            self._move(data)

    def _free(self) -> None:
        self._allocator.release(self._full_key)
        if not self._allocator.recycles:
            self._move(None)

    def _move(self, data: torch.Tensor | None) -> None:
        """Let the parameters be views of `data`; None: of nothing."""
        self.full = FullBuffer(self._spec.layout, self._nothing if data is None else data)
        if self.on_move is not None:
            self.on_move(None if data is None else self.full)

    def _enter(self, event: str) -> None:
        following = _TRANSITIONS.get((self.state, event))
        if following is None:
            raise LifecycleError(f"weights of {self._spec.name}: {event} while {self.state.value}")
        self.state = following

    def _publish(self, kind: Literal["materialise", "release"]) -> None:
        if not self._events.wants(kind):
            return
        self._events.publish(
            Event(
                kind=kind,
                operation="",
                dtype=dtype_name(self._spec.dtypes.compute),
                payload_bytes=self._full_key.size_bytes,
                group=self.role,
                group_size=self._gather.size,
                bucket=self._spec.name,
            )
        )
