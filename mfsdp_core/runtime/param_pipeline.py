"""When compute weights are gathered and released, unit by unit."""

from __future__ import annotations

from mfsdp_core.comm.torch_backend import dtype_name
from mfsdp_core.events import Event, EventBus
from mfsdp_core.plan.prefetch import Direction, PrefetchOrder
from mfsdp_core.runtime.units import Unit


class ParamPipeline:
    """Gathers, prefetches and releases; which bucket does what is up to its placements."""

    def __init__(
        self,
        root: Unit,
        units: list[Unit],
        order: PrefetchOrder,
        events: EventBus,
        *,
        prefetch: bool,
    ) -> None:
        self._root = root
        self._units = units
        self._events = events
        self._prefetch = prefetch
        self.order = order

    def issue(self, unit: Unit) -> bool:
        """Start whatever gathers `unit` needs; whether there were any."""
        started = [group.weights.issue() for group in unit.groups]
        return any(started)

    def ready(self, unit: Unit) -> None:
        """Return once `unit` may compute."""
        self.issue(unit)
        for group in unit.groups:
            group.weights.wait()

    def prefetch(self, unit: Unit, direction: Direction) -> None:
        """Start the gathers of the unit that is expected to follow `unit`."""
        if not self._prefetch:
            return
        following = self.order.following(unit.place, direction)
        if following is None:
            return
        target = self._units[following]
        if self.issue(target):
            self._publish(target)

    def pass_over(self, unit: Unit) -> None:
        """Take part in the gathers of a unit that other ranks may run and this one does not."""
        self.issue(unit)
        self.release(unit)

    def release(self, unit: Unit) -> None:
        """Free the unit's full buffers, where its placements say so."""
        for group in unit.groups:
            group.weights.release()

    def release_all(self) -> None:
        """Free everything that is not persistent, prefetched and never used included."""
        for unit in (*self._units, self._root):
            self.release(unit)

    def complete(self) -> None:
        """Wait for every gather under way, without starting any."""
        for unit in (self._root, *self._units):
            for group in unit.groups:
                group.weights.complete()

    def install(self, *, frozen_too: bool = False) -> None:
        """Bring updated main weights into the compute copies of all units."""
        for unit in (self._root, *self._units):
            for group in unit.groups:
                if group.is_trainable or frozen_too:
                    group.weights.install()

    def broadcast(self) -> None:
        """Make replicated main weights those of the first rank."""
        for unit in (self._root, *self._units):
            for group in unit.groups:
                group.weights.broadcast()

    def _publish(self, target: Unit) -> None:
        if not self._events.wants("prefetch"):
            return
        for group in target.groups:
            layout, compute = group.plan.layout, group.dtypes.compute
            self._events.publish(
                Event(
                    kind="prefetch",
                    operation="all_gather",
                    dtype=dtype_name(compute),
                    payload_bytes=layout.total_elements * compute.itemsize,
                    group=group.weights.role,
                    group_size=layout.slices,
                    bucket=group.plan.name,
                )
            )
