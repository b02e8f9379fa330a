"""When compute weights are gathered and released, unit by unit."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import filterfalse
from typing import Any

from mfsdp_core.comm.torch_backend import dtype_name
from mfsdp_core.events import Event, EventBus
from mfsdp_core.memory.allocation import Allocators
from mfsdp_core.memory.pools import SlotPool
from mfsdp_core.plan.prefetch import (
    Direction,
    GatherOrder,
    PrefetchLimits,
    PrefetchOrder,
    Residents,
    gather_ahead,
)
from mfsdp_core.runtime.bucket import Bucket
from mfsdp_core.runtime.units import Unit


class ParamPipeline:
    """Gathers, prefetches and releases; which bucket does what is up to its placements.

    gathered: by direction, the units that the pass under way has gathered; not ahead again.
    """

    def __init__(
        self,
        root: Unit,
        units: list[Unit],
        order: PrefetchOrder,
        gathered: Mapping[Direction, GatherOrder],
        events: EventBus,
        *,
        prefetch: bool,
        budget_bytes: int | None,
        allocators: Allocators,
    ) -> None:
        self._root = root
        self._units = units
        self._events = events
        self._prefetch = prefetch
        self._pool = pool = allocators.pools.get("compute_weights")
        self._streams = allocators.streams
        self._by_name = {unit.name: unit for unit in units}
        self._gathered = _Gathered(units)
        self._anywhere = Residents(self._gathered)
        self._limits = PrefetchLimits(budget_bytes, None if pool is None else pool.plan.slots)
        self._is_unlimited = budget_bytes is None and pool is None
        self._sizes_bytes = [sum(g.weights.full_bytes for g in unit.buckets) for unit in units]
        self._pooled = frozenset(
            unit.index
            for unit in units
            if pool is not None and unit.index is not None and unit.name in pool.plan.homes
        )
        self.order = order
        self.gathered = gathered

    def issue(self, unit: Unit, direction: Direction, buckets: list[Bucket] | None = None) -> bool:
        """Start whatever gathers `unit` needs, or only `buckets` of it; whether there were any."""
        wanted = unit.buckets if buckets is None else buckets
        for bucket in wanted:
            weights = bucket.weights
            if not weights.is_gathered or (
                weights.has_two_payloads and not weights.serves(direction)
            ):
                break
        else:
            return False
        if self._pool is not None:
            self._make_room(unit, self._pool)
        started = False
        for bucket in wanted:
            started |= bucket.weights.issue(direction)
        return started

    def ready(self, unit: Unit, direction: Direction, buckets: list[Bucket] | None = None) -> None:
        """Return once `unit`, or what needs only `buckets` of it, may compute."""
        self.issue(unit, direction, buckets)
        unit.ahead = False
        for bucket in unit.buckets if buckets is None else buckets:
            bucket.weights.complete()

    def issue_ahead(
        self, unit: Unit, direction: Direction, buckets: list[Bucket], *, of: Unit
    ) -> bool:
        """Start gathering `buckets` of `unit` ahead of need while `of` runs, if there is room.

        A unit of which something is there already has its room.
        """
        if not any(bucket.weights.is_gathered for bucket in unit.buckets):
            upcoming = [] if unit.index is None else [unit.index]
            if not gather_ahead(
                upcoming,
                self._sizes_bytes,
                self._limits,
                self._residents(),
                from_unit=of.index is not None,
                recomputing=False,
            ):
                return False
            unit.ahead = True
        self.issue(unit, direction, buckets)
        self._publish(buckets)
        return True

    def prefetch(self, unit: Unit, direction: Direction, *, recomputing: bool = False) -> None:
        """Start the gathers of units that are expected to follow `unit`; see `gather_ahead`."""
        if not self._prefetch:
            return
        passed = self.gathered[direction].gathered
        given = unit.followers.get(direction) if unit.followers and not recomputing else None
        following: Iterable[int] = self.order.upcoming(unit.index, direction)
        if given is not None:
            following = [one.index for one in given if one.index is not None]
        left = filterfalse(passed.__contains__, following)
        chosen = gather_ahead(
            left,
            self._sizes_bytes,
            self._limits,
            self._anywhere if self._is_unlimited else self._residents(),
            from_unit=unit.index is not None,
            recomputing=recomputing,
        )
        for index in chosen if given is None else left:
            target = self._units[index]
            if self.issue(target, direction):
                target.ahead = True
                self._publish(target.buckets)

    def _residents(self) -> Residents:
        if self._is_unlimited:
            return self._anywhere
        ahead_bytes = 0
        if self._limits.budget_bytes is not None:
            ahead = (unit.index for unit in self._units if unit.ahead and unit.index is not None)
            ahead_bytes = sum(self._sizes_bytes[index] for index in ahead)
        if self._pool is None:
            return Residents(self._gathered, ahead_bytes)
        slots = {
            index: slot
            for index in self._pooled
            if (slot := self._pool.assigned_slot(self._units[index].name)) is not None
        }
        holding = frozenset(self._pool.holders())
        return Residents(self._gathered, ahead_bytes, self._pooled, slots, holding)

    def _make_room(self, unit: Unit, pool: SlotPool) -> None:
        """Give back what was gathered ahead into the slot that `unit` needs, and has not run."""
        for holder in pool.blocking(unit.name):
            if self._by_name[holder].ahead:
                self.release(self._by_name[holder])

    def join_collectives(self, unit: Unit, direction: Direction, buckets: list[Bucket]) -> None:
        """Take part, without running, in the gathers of a unit that other ranks may run.

        buckets: its buckets in the order in which those ranks gather them.
        """
        self.issue(unit, direction, buckets)
        if direction not in unit.stays:
            self.release(unit)

    def release(self, unit: Unit) -> None:
        """Free the unit's full buffers, where its placements say so."""
        unit.ahead = False
        for bucket in unit.buckets:
            if bucket.weights.full.held:
                bucket.weights.release()

    def release_all(self) -> None:
        """After a forward pass: free what does not stay, prefetched and never used included."""
        for unit in (*self._units, self._root):
            if "forward" not in unit.stays:
                self.release(unit)

    def complete(self) -> None:
        """Wait for every gather under way, without starting any."""
        for unit in (self._root, *self._units):
            for bucket in unit.buckets:
                bucket.weights.complete()

    def install(self, *, loaded: bool = False) -> None:
        """Bring updated main weights into the compute copies of all units.

        loaded: frozen ones as well, and they have nothing to do with those before.
        """
        changed = []
        for unit in (self._root, *self._units):
            for bucket in unit.buckets:
                if bucket.is_trainable or loaded:
                    bucket.weights.install(anew=loaded)
                    if bucket.look():
                        changed.append(unit)
        # What updates many tensors at once is not always counted by autograd.
        for unit in changed or (self._root, *self._units):
            unit.epoch += 1

    def follow_changes(self, units: Iterable[Unit] | None = None) -> None:
        """Bring weights that the user has changed in place into the compute copies.

        Gathers from here on read main weights as they are now. units: where to look, None: in all.
        """
        for unit in (self._root, *self._units) if units is None else units:
            for bucket in unit.buckets:
                if bucket.look():
                    bucket.weights.install()
                    unit.epoch += 1
        if self._streams.copy_in is not None:
            self._streams.copy_in.follow()

    def broadcast(self) -> None:
        """Make replicated main weights those of the first rank."""
        for unit in (self._root, *self._units):
            unit.epoch += 1
            for bucket in unit.buckets:
                bucket.weights.broadcast()

    def _publish(self, buckets: list[Bucket]) -> None:
        if "prefetch" not in self._events.wanted:
            return
        for bucket in buckets:
            plan, compute = bucket.plan, bucket.dtypes.compute
            size = plan.layout.total_elements * compute.itemsize
            where = (bucket.weights.role, plan.layout.slices, plan.name)
            event = Event("prefetch", "all_gather", dtype_name(compute), size, *where)
            self._events.publish(event)


class _Gathered:
    """The indices of units whose weights are there or under way, without listing them."""

    def __init__(self, units: list[Unit]) -> None:
        self._units = units

    def __contains__(self, index: Any) -> bool:
        for bucket in self._units[index].buckets:  # noqa: SIM110 - one frame, in every prefetch
            if not bucket.weights.is_gathered:
                return False
        return True
