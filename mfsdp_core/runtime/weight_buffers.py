"""Weights of one bucket: the compute copy that runs, the main copy that is optimized.

[Note: one copy] Where main and compute weights have the same dtype they share storage:

    parameter    optimizer    main weights are
    REPLICATE    REPLICATE    the compute buffer
    REPLICATE    FLAT         this rank's slice of the compute buffer
    FLAT         FLAT         the shard from which compute weights are gathered

Residency of the compute weights:

    EMPTY ---------issue-------> COMMUNICATING --complete--> READY
    READY ---------release-----> EMPTY           (persistent buckets stay READY)
    READY ---------invalidate--> PRESERVED       storage is there, the contents are of last step
    PRESERVED -----issue-------> COMMUNICATING   refreshed in place
"""

from __future__ import annotations

from enum import Enum
from typing import Literal

from mfsdp_core.comm.protocol import Communicator, Pending
from mfsdp_core.comm.torch_backend import dtype_name
from mfsdp_core.errors import LifecycleError
from mfsdp_core.events import Event, EventBus
from mfsdp_core.memory.allocators import BucketAllocator, BufferKey, Role
from mfsdp_core.plan.strategy import Collective
from mfsdp_core.runtime.bucket import BucketSpec
from mfsdp_core.shard.flat_buffer import FullBuffer


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
        communicator: Communicator,
        allocator: BucketAllocator,
        *,
        persistent: bool,
        events: EventBus,
    ) -> None:
        self._name = spec.name
        self._layout = layout = spec.layout
        self._axis = spec.axis
        self._dtypes = spec.dtypes
        self._communicator = communicator
        self._allocator = allocator
        self._persistent = persistent or not spec.axis.gathers_every_use
        self._events = events
        self._work: Pending | None = None
        self.state = Residency.READY
        self._full_key = BufferKey(
            spec.name, "compute_weights", layout.total_elements, spec.dtypes.compute
        )
        self.full = FullBuffer(layout, allocator.acquire(self._full_key))
        self.full.zero_gaps()

    def adopt(self) -> None:
        """Make the shard and main copies from the full buffer, which the caller has filled."""
        slice_elements = self._layout.slice_elements
        own = self.full.own(self._communicator.rank)
        if self._axis.gathers_every_use:
            role: Role = "main_weights" if self._dtypes.shares_weights else "compute_shard"
            key = BufferKey(self._name, role, slice_elements, self._dtypes.compute)
            self._source = self._allocator.acquire(key).copy_(own)
        elif self._axis.shards_optimizer:
            self._source = own
        else:
            self._source = self.full.data
        self.main = self._source
        if not self._dtypes.shares_weights:
            elements = self._source.numel()
            key = BufferKey(self._name, "main_weights", elements, self._dtypes.main_params)
            self.main = self._allocator.acquire(key).copy_(self._source)
        if not self._persistent:
            self._enter("release")
            self._allocator.release(self._full_key)

    def issue(self) -> bool:
        """Start gathering unless the weights are there or under way; whether it was started."""
        if self.state in (Residency.READY, Residency.COMMUNICATING):
            return False
        if self.state is Residency.EMPTY:
            self._allocator.acquire(self._full_key)
            self._publish("materialise")
        self._enter("issue")
        self._work = self._communicator.all_gather(self.full.data, self._source, self._name)
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
        self._allocator.release(self._full_key)
        self._publish("release")

    def install(self) -> None:
        """Bring updated main weights into the compute copy; other ranks' slices become stale."""
        self.complete()
        if not self._dtypes.shares_weights:
            self._source.copy_(self.main)
        if self._axis.weight_refresh is Collective.ALL_GATHER:
            self._enter("invalidate")

    def broadcast(self) -> None:
        """Replace replicated main weights by those of the group's first rank."""
        if not self._axis.shards_optimizer:
            self._communicator.broadcast(self.main, self._name).wait()
        self.install()

    def _enter(self, event: str) -> None:
        following = _TRANSITIONS.get((self.state, event))
        if following is None:
            raise LifecycleError(f"weights of {self._name}: {event} while {self.state.value}")
        self.state = following

    def _publish(self, kind: Literal["materialise", "release"]) -> None:
        self._events.publish(
            Event(
                kind=kind,
                operation="",
                dtype=dtype_name(self._dtypes.compute),
                payload_bytes=self._full_key.size_bytes,
                group="inner",
                group_size=self._communicator.size,
                bucket=self._name,
            )
        )
