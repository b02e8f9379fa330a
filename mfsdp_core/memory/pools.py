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

from mfsdp_core.comm.torch_backend import torch_dtype
from mfsdp_core.errors import PoolExhaustedError
from mfsdp_core.memory.allocators import BucketAllocator, BufferKey
from mfsdp_core.memory.ledger import POOL, MemoryLedger
from mfsdp_core.plan.buffers import CATEGORY_OF_ROLE, Role
from mfsdp_core.plan.pools import PoolPlan
from mfsdp_core.streams import Streams


class SlotPool:
    """The slots of one role, for the buckets of `plan`; for every other bucket, `fallback`."""

    def __init__(
        self,
        role: Role,
        plan: PoolPlan,
        fallback: BucketAllocator,
        *,
        streams: Streams,
        ledger: MemoryLedger,
    ) -> None:
        self.role = role
        self.plan = plan
        self._fallback = fallback
        # Zeros, once: padding travels with every collective and must be finite.
        with streams.communicated():
            self._slots = [
                [
                    torch.zeros(area.elements, dtype=torch_dtype(area.dtype), device=streams.device)
                    for area in plan.areas
                ]
                for _ in range(plan.slots)
            ]
        self._ledger = ledger
        ledger.add(CATEGORY_OF_ROLE[role], plan.size_bytes, bucket=POOL, role=role)
        self._units = {
            BufferKey(r.bucket, role, r.elements, torch_dtype(r.dtype)): r.unit for r in plan.served
        }
        self._unit_of_bucket = {r.bucket: r.unit for r in plan.served}
        self._assigned: dict[str, int] = {}
        self._holders: dict[int, str] = {}
        self._held: dict[str, dict[BufferKey, torch.Tensor]] = {}
        self._views: dict[tuple[BufferKey, int], torch.Tensor] = {}

    @property
    def recycles(self) -> bool:
        """Slots go from unit to unit."""
        return True

    def blocking(self, bucket: str) -> list[str]:
        """Units that hold what the unit of `bucket` needs: its slot, or all if it never had one."""
        unit = self._unit_of_bucket.get(bucket)
        if unit is None or unit in self._held:
            return []
        slot = self._assigned.get(unit)
        if slot is not None:
            return [self._holders[slot]] if slot in self._holders else []
        return [] if self._idle_slots() else list(self._holders.values())

    def serves(self, key: BufferKey) -> bool:
        """Whether `key` was planned for; if not, `fallback` answers."""
        return key in self._units

    def assigned_slot(self, unit: str) -> int | None:
        """The slot that `unit` has, or had last; None before its first acquisition."""
        return self._assigned.get(unit)

    def holders(self) -> dict[int, str]:
        """Slot -> the unit that holds it now."""
        return dict(self._holders)

    def forget_assignments(self) -> None:
        """Let every unit choose its slot anew. Nothing may be held."""
        self._assigned.clear()

    def has_room(self, key: BufferKey) -> bool:
        """Whether the slot that the unit had is idle; before its first, whether any is."""
        unit = self._units.get(key)
        if unit is None:
            return self._fallback.has_room(key)
        if unit in self._held:
            return True
        slot = self._assigned.get(unit)
        if slot is None:
            return len(self._holders) < self.plan.slots
        return slot not in self._holders

    def acquire(self, key: BufferKey, *, in_place: bool = False) -> torch.Tensor:
        """The area of `key`'s bucket in the slot of its unit.

        Raises:
            PoolExhaustedError: no slot is idle, or, with `in_place`, not the one that it had.
        """
        unit = self._units.get(key)
        if unit is None:
            return self._fallback.acquire(key, in_place=in_place)
        held = self._held.get(unit)
        if held is None:
            self._take_slot(unit, key, in_place=in_place)
            held = self._held[unit] = {}
        tensor = held.get(key)
        if tensor is None:
            tensor = held[key] = self._view(key, self._assigned[unit])
            self._occupy(key, key.size_bytes)
        return tensor

    def release(self, key: BufferKey) -> None:
        """Give the area back; the slot is idle when the unit's last area is."""
        unit = self._units.get(key)
        if unit is None:
            self._fallback.release(key)
            return
        held = self._held.get(unit)
        if held is None or held.pop(key, None) is None:
            return
        self._occupy(key, -key.size_bytes)
        if not held:
            del self._held[unit]
            del self._holders[self._assigned[unit]]

    def _occupy(self, key: BufferKey, count_bytes: int) -> None:
        category = CATEGORY_OF_ROLE[self.role]
        self._ledger.add(category, count_bytes, key.bucket, key.role, in_pool=True)

    def _view(self, key: BufferKey, slot: int) -> torch.Tensor:
        """One tensor object per buffer and slot, so that holders can tell whether it has moved."""
        view = self._views.get((key, slot))
        if view is None:
            area = self._slots[slot][self.plan.area_of[key.bucket]]
            view = self._views[key, slot] = area[: key.elements]
        return view

    def _take_slot(self, unit: str, key: BufferKey, *, in_place: bool) -> None:
        slot = self._assigned.get(unit)
        if in_place and slot is not None and slot in self._holders:
            why = (
                f"only slot {slot} will do: autograd has saved views of the weights that were in it"
            )
            raise PoolExhaustedError(self._describe_shortage(unit, key, why))
        if slot is None:
            slot = self._first_slot(unit, key)
        elif slot in self._holders:
            other = self._other_slot(unit, key)
            warnings.warn(
                f"{self.role} pool: unit {unit} had slot {slot}, which unit "
                f"{self._holders[slot]} holds; it gets slot {other} instead. Memory registered or "
                f"captured for slot {slot} is not used by {unit} any more.",
                RuntimeWarning,
                stacklevel=4,
            )
            slot = other
        self._assigned[unit] = slot
        self._holders[slot] = unit

    def _first_slot(self, unit: str, key: BufferKey) -> int:
        home = self.plan.homes[unit]
        return self._other_slot(unit, key) if home in self._holders else home

    def _other_slot(self, unit: str, key: BufferKey) -> int:
        """The idle slot that the fewest units have been given, so that neighbours differ."""
        idle = self._idle_slots()
        if not idle:
            raise PoolExhaustedError(self._describe_shortage(unit, key, "none is left"))
        users = list(self._assigned.values())
        return min(idle, key=lambda slot: (users.count(slot), slot))

    def _idle_slots(self) -> list[int]:
        return [slot for slot in range(self.plan.slots) if slot not in self._holders]

    def _describe_shortage(self, unit: str, key: BufferKey, why: str) -> str:
        holders = ", ".join(f"slot {s}: unit {u}" for s, u in sorted(self._holders.items()))
        idle = ", ".join(f"slot {s}" for s in self._idle_slots()) or "none"
        return (
            f"{self.role} pool of {self.plan.slots} slots: bucket {key.bucket} of unit {unit} "
            f"({key.size_bytes} bytes) needs a slot, and {why}. Holders: {holders or 'none'}; idle "
            f"slots: {idle}. Raise pool_slots, or use allocator='storage_resize'."
        )
