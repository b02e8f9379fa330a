"""When compute weights are gathered and released: the one place that decides it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import filterfalse
from typing import Any

import torch

from mfsdp_core.comm.torch_backend import dtype_name
from mfsdp_core.events import Event, EventBus
from mfsdp_core.memory.allocation import Allocators
from mfsdp_core.memory.pools import SlotPool
from mfsdp_core.plan.payload import BOTH
from mfsdp_core.plan.prefetch import (
    Direction,
    GatherOrder,
    PrefetchLimits,
    PrefetchOrder,
    Residents,
    gather_ahead,
)
from mfsdp_core.runtime.bucket import Bucket
from mfsdp_core.runtime.units import GatherPoint, Unit


class Schedule:
    """Gathers, prefetches and releases units as a whole; what a bucket does, its placements say.

    points: modules at whose calls weights are gathered. order: of units. gathered: by direction,
    the units that the pass under way has gathered; not ahead again.
    """

    #: The unit of which some buckets were gathered, and others are still to be.
    partial: tuple[Unit, Direction] | None = None
    #: The order in which modules have run, for ranks to compare; whether all gather in it.
    seen: Sequence[int] = ()
    is_agreed = False

    def __init__(
        self,
        root: Unit,
        units: list[Unit],
        order: PrefetchOrder,
        events: EventBus,
        *,
        prefetch: bool,
        budget_bytes: int | None,
        allocators: Allocators,
    ) -> None:
        self.points = [GatherPoint(unit, unit.module, unit.buckets) for unit in (root, *units)]
        self.order = order
        self.gathered = {direction: GatherOrder(order, direction) for direction in BOTH}
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

    def begin_pass(self) -> None:
        """The root begins to run."""
        self.gathered["forward"].begin()

    def enter(self, index: int) -> None:
        """A unit runs for the first time in a forward pass: join in what others may gather."""
        order = self.gathered["forward"]
        for skipped in order.missing_before(index):
            order.gathered.add(skipped)
            self.join(self._units[skipped], "forward")
        order.gathered.add(index)

    def start(self, point: GatherPoint, direction: Direction) -> None:
        """A module is about to run, or a gradient has reached its output: gather what it needs."""
        self.issue(point.unit, direction)

    def show(self, point: GatherPoint) -> None:
        """Return once the module may compute, and sees whole weights."""
        unit = point.unit
        unit.ahead = False
        for bucket in unit.buckets:
            bucket.weights.complete()
        unit.show_raw()

    def ahead(self, point: GatherPoint, direction: Direction) -> None:
        """Start the gathers of what is expected to follow; see `gather_ahead`."""
        if not self._prefetch:
            return
        unit, passed = point.unit, self.gathered[direction].gathered
        given = unit.followers.get(direction) if unit.followers else None
        following: Iterable[int] = self.order.upcoming(unit.index, direction)
        if given is not None:
            following = [one.index for one in given if one.index is not None]
        left = filterfalse(passed.__contains__, following)
        for index in self._chosen(left, of=unit) if given is None else left:
            target = self._units[index]
            if self.issue(target, direction):
                target.ahead = True
                self._publish(target.buckets)

    def end_forward(self, point: GatherPoint) -> None:
        """The module has run."""

    def end_pass(self) -> None:
        """The root has run: join in what others may gather, and free units gathered in vain."""
        order = self.gathered["forward"]
        for index in order.missing_before(None):
            self.join(self._units[index], "forward")
        order.end()
        self.order.finish_pass()
        for unit in self._units:
            if "forward" not in unit.stays:
                self.release(unit)

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

    def buckets(self, unit: Unit, _direction: Direction) -> list[Bucket]:
        """All buckets of a unit in the order in which a pass through it gathers them."""
        return unit.buckets

    def join(self, unit: Unit, direction: Direction) -> None:
        """Take part, without running, in the gathers of a unit that other ranks may run."""
        if self.partial is not None:
            self.gather_rest()
        self.issue(unit, direction, self.buckets(unit, direction))
        if direction not in unit.stays:
            self.release(unit)

    def agree(self, unit: Unit, direction: Direction) -> None:
        """Before a unit is gathered that the pass has gathered already; see `rendezvous`."""
        for bucket in self.buckets(unit, direction):
            bucket.weights.rendezvous()

    def gather_rest(self, unit: Unit | None = None, *, forget: bool = False) -> None:
        """Gather what a unit, or `unit` alone, has not gathered; forget: or leave it at that."""

    def escapes(self, point: GatherPoint, outputs: list[torch.Tensor], *, hooked: bool) -> None:
        """Nothing can: the unit's weights are there as long as anything of it."""

    def _chosen(self, upcoming: Iterable[int], *, of: Unit) -> list[int]:
        return gather_ahead(
            upcoming,
            self._sizes_bytes,
            self._limits,
            self._anywhere if self._is_unlimited else self._residents(),
            from_unit=of.index is not None,
        )

    def _residents(self) -> Residents:
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

    def release(self, unit: Unit) -> None:
        """Free the unit's full buffers, where its placements say so."""
        unit.ahead = False
        for bucket in unit.buckets:
            if bucket.weights.full.held:
                bucket.weights.release()

    def wait(self, units: Iterable[Unit] | None = None) -> None:
        """Wait for the gathers of units under way, without starting any; None: of all."""
        for unit in (self._root, *self._units) if units is None else units:
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
