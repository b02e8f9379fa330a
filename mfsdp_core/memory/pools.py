"""Buffer pools: a fixed number of slots that units use one after another.

All slots are allocated and zeroed when the pool is built, with the sizes that `plan/pools.py` has
planned, and stay where they are: addresses can be registered with a network or captured in a graph.

[Note: strict assignment] A unit gets the slot that it had before. Autograd saves views of weights,
and they read whatever is in that slot during the backward pass. Where the slot is taken, another
one is given with a warning that names both, and is the unit's from then on. Until a unit has been
given a slot it prefers the one that was planned for it.
"""

from __future__ import annotations

import warnings

import torch

from mfsdp_core.errors import PoolExhaustedError
from mfsdp_core.memory.allocators import Allocator, DBuffer, carve
from mfsdp_core.memory.ledger import POOL, MemoryLedger
from mfsdp_core.plan.buffers import CATEGORY_OF_ROLE
from mfsdp_core.plan.pools import PoolPlan, Role
from mfsdp_core.streams import Streams


class SlotPool(Allocator):
    """The slots of the pool `role`, for the buffers of `plan`."""

    def __init__(
        self, role: Role, plan: PoolPlan, *, streams: Streams, ledger: MemoryLedger
    ) -> None:
        super().__init__(streams, ledger, "tensor")
        self.role = role
        self.plan = plan
        # Zeros, once: padding travels with every collective and must be finite.
        self._areas = carve(streams, plan.areas * plan.slots)
        for area in plan.areas:
            size = plan.slots * area.size_bytes
            ledger.add(CATEGORY_OF_ROLE[area.role], size, bucket=POOL, role=area.role)
        self._assigned: dict[str, int] = {}
        self._holders: dict[int, str] = {}
        self._held: dict[str, set[DBuffer]] = {}
        self._views: dict[tuple[DBuffer, int], torch.Tensor] = {}

    def blocking(self, unit: str) -> list[str]:
        """Units that hold what `unit` needs: its slot, or all if it never had one."""
        if unit not in self.plan.homes or unit in self._held:
            return []
        slot = self._assigned.get(unit)
        if slot is not None:
            return [self._holders[slot]] if slot in self._holders else []
        return [] if self._idle_slots() else list(self._holders.values())

    def assigned_slot(self, unit: str) -> int | None:
        """The slot that `unit` has, or had last; None before its first acquisition."""
        return self._assigned.get(unit)

    def holders(self) -> dict[int, str]:
        """Slot -> the unit that holds it now."""
        return dict(self._holders)

    def forget_assignments(self) -> None:
        """Let every unit choose its slot anew. Nothing may be held."""
        self._assigned.clear()

    def has_room(self, buffer: DBuffer) -> bool:
        """Whether the slot that the unit had is idle; before its first, whether any is."""
        return not self.blocking(buffer.row.unit)

    def take(self, buffer: DBuffer, *, in_place: bool = False) -> None:
        """The area of the buffer in the slot of its unit.

        Raises:
            PoolExhaustedError: no slot is idle, or, with `in_place`, not the one that it had.
        """
        row, unit = buffer.row, buffer.row.unit
        held = self._held.get(unit)
        if held is None:
            self._take_slot(unit, buffer, in_place=in_place)
            held = self._held[unit] = set()
        held.add(buffer)
        slot = self._assigned[unit]
        view = self._views.get((buffer, slot))
        if view is None:  # one object per slot, so that holders can tell whether it has moved
            area = self._areas[slot * len(self.plan.areas) + self.plan.area_of[row]]
            view = self._views[buffer, slot] = area[: buffer.elements]
        buffer.data = view
        size = buffer.size_bytes
        self._ledger.add(buffer.category, size, row.bucket, row.role, in_pool=True)

    def give(self, buffer: DBuffer) -> None:
        """Give the area back; the slot is idle when the unit's last area is."""
        row, unit, size = buffer.row, buffer.row.unit, buffer.size_bytes
        buffer.held, held = False, self._held[unit]
        held.remove(buffer)
        self._ledger.add(buffer.category, -size, row.bucket, row.role, in_pool=True)
        if not held:
            del self._held[unit]
            del self._holders[self._assigned[unit]]

    def _take_slot(self, unit: str, buffer: DBuffer, *, in_place: bool) -> None:
        slot = self._assigned.get(unit)
        if in_place and slot is not None and slot in self._holders:
            why = (
                f"only slot {slot} will do: autograd has saved views of the weights that were in it"
            )
            raise PoolExhaustedError(self._describe_shortage(buffer, why))
        if slot is None:
            home = self.plan.homes[unit]
            slot = self._other_slot(buffer) if home in self._holders else home
        elif slot in self._holders:
            other = self._other_slot(buffer)
            warnings.warn(
                f"{self.role} pool: unit {unit} had slot {slot}, which unit "
                f"{self._holders[slot]} holds; it gets slot {other} instead. Memory registered or "
                f"captured for slot {slot} is not used by {unit} any more.",
                RuntimeWarning,
                stacklevel=5,
            )
            slot = other
        self._assigned[unit] = slot
        self._holders[slot] = unit

    def _other_slot(self, buffer: DBuffer) -> int:
        """The idle slot that the fewest units have been given, so that neighbours differ."""
        idle = self._idle_slots()
        if not idle:
            raise PoolExhaustedError(self._describe_shortage(buffer, "none is left"))
        users = list(self._assigned.values())
        return min(idle, key=lambda slot: (users.count(slot), slot))

    def _idle_slots(self) -> list[int]:
        return [slot for slot in range(self.plan.slots) if slot not in self._holders]

    def _describe_shortage(self, buffer: DBuffer, why: str) -> str:
        holders = ", ".join(f"slot {s}: unit {u}" for s, u in sorted(self._holders.items()))
        idle = ", ".join(f"slot {s}" for s in self._idle_slots()) or "none"
        return (
            f"{self.role} pool of {self.plan.slots} slots: bucket {buffer.row.bucket} of unit "
            f"{buffer.row.unit} ({buffer.size_bytes} bytes) needs a slot, and {why}. Holders: "
            f"{holders or 'none'}; idle slots: {idle}. Raise pool_slots, or use "
            "allocator='storage_resize'."
        )
