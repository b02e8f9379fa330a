"""Planning of buffer pools: how many slots, of which areas, and who sits where. Pure.

A pool has `slots` equal slots that units use one after another. A slot is a row of areas; the
j-th largest buffer of a unit (per role and dtype) sits in area j of that role and dtype:

    areas of a slot      bfloat16[0]         bfloat16[1]   float32[0]
    slot 0             |################|  |#########|    |####|
    slot 1             |################|  |#########|    |####|
    unit "attention"    ##########......    ######...      ####       . waste
    unit "mamba"        ################    #########

[Note: smallest pool] With area j as large as the largest j-th largest buffer of any unit, every
unit fits and no pool that every unit fits is smaller: sorted by size, its j-th area has to take the
j-th largest buffer of each unit.

Sizes are padded sizes, those of the buffers themselves: two units with equal parameters may differ
in padding, and an area must never have to grow (1.7 of the specification).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import Literal, NamedTuple

from mfsdp_core.plan.dtype_policy import element_bytes

PoolKind = Literal["fixed_pool", "max_pool"]
Role = Literal[
    "compute_weights",
    "grad_bucket",
    "outer_bucket",
    "main_weights",
    "compute_shard",
    "payload_shard",
    "payload",
    "accumulator",
    "host_gradient",
    "grad_cast",
    "peer_slices",
]
#: model: from sharding on. use: from a gather to the release of the unit. gather: until what was
#: gathered is decoded. reduction: from the first gradient until the result has landed. cycle: from
#: the first gradient of a cycle to `zero_grad`. step: from the end of the cycle's reduction to it.
#: version: from a gather, of plain weights from sharding on, until main weights change.
Lifetime = Literal["model", "use", "gather", "reduction", "cycle", "step", "version"]


class Buffer(NamedTuple):
    """A row of the table of `plan/buffers.py`: `slices` of a bucket's layout, in one role.

    dtype: torch's name without prefix. slice_elements: of one slice. payload: which one of the
    encoded weights; "" of everything else. padding_elements: those that belong to no parameter.
    is_sent: whether collectives read or write it. where: the memory that it is in.
    """

    unit: str
    bucket: str
    role: Role
    dtype: str
    slices: range
    slice_elements: int
    lifetime: Lifetime
    payload: str = ""
    padding_elements: int = 0
    is_sent: bool = True
    where: Literal["device", "host"] = "device"

    @property
    def elements(self) -> int:
        """Size of the buffer, padding included."""
        return len(self.slices) * self.slice_elements

    @property
    def size_bytes(self) -> int:
        """Its bytes."""
        return self.elements * element_bytes(self.dtype)


@dataclass(frozen=True)
class PoolPlan:
    """Where every buffer of the pooled units sits.

    areas: of every slot, each as the largest buffer that it is for. homes: unit -> slot that it
    takes first (unit k takes slot k modulo `slots`). area_of: buffer -> index of its area. What is
    in neither no slot serves.
    """

    slots: int
    areas: tuple[Buffer, ...]
    homes: dict[str, int]
    area_of: dict[Buffer, int]

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot."""
        return sum(area.size_bytes for area in self.areas)

    @property
    def size_bytes(self) -> int:
        """Bytes of the pool."""
        return self.slots * self.slot_bytes

    @property
    def offsets_bytes(self) -> tuple[int, ...]:
        """Where each area would begin if a slot's areas lay one after the other."""
        return tuple(accumulate((area.size_bytes for area in self.areas), initial=0))[:-1]


def plan_pool(kind: PoolKind, requests: Sequence[Buffer], slots: int) -> PoolPlan:
    """Plan a pool for the `requests` of units, given in registration order of the units.

    `max_pool` serves every unit. `fixed_pool` serves the units of the most frequent signature (the
    sorted roles, dtypes and sizes of a unit's buffers; of equally frequent ones that with the most
    bytes, then the first) and leaves the others outside. There are no more slots than units served.
    """
    by_unit: dict[str, list[Buffer]] = {}
    for request in requests:
        by_unit.setdefault(request.unit, []).append(request)
    served = by_unit if kind == "max_pool" else _largest_class(by_unit)
    slots = min(slots, len(served))
    homes = {unit: index % slots for index, unit in enumerate(served)}
    areas, area_of = _areas(served.values())
    return PoolPlan(slots, areas, homes, area_of)


def _largest_class(by_unit: dict[str, list[Buffer]]) -> dict[str, list[Buffer]]:
    signatures = {
        unit: tuple(sorted((r.role, r.dtype, r.elements) for r in requests))
        for unit, requests in by_unit.items()
    }
    counts = Counter(signatures.values())

    def weight(unit: str) -> tuple[int, int]:
        return counts[signatures[unit]], sum(r.size_bytes for r in by_unit[unit])

    best = signatures[max(by_unit, key=weight)]
    return {unit: requests for unit, requests in by_unit.items() if signatures[unit] == best}


def _areas(units: Iterable[list[Buffer]]) -> tuple[tuple[Buffer, ...], dict[Buffer, int]]:
    """Areas by [Note: smallest pool], and the area of every buffer."""
    largest: dict[tuple[str, str, int], Buffer] = {}
    ranks: dict[Buffer, tuple[str, str, int]] = {}
    for requests in units:
        # Sorting is stable, so equal sizes keep the order of the buckets on every rank.
        ordered = sorted(requests, key=lambda r: (r.role, r.dtype, -r.elements))
        for (role, dtype), same in groupby(ordered, key=lambda r: (r.role, r.dtype)):
            for rank, request in enumerate(same):
                key = ranks[request] = (role, dtype, rank)
                largest[key] = max(largest.get(key, request), request, key=lambda r: r.elements)
    order = sorted(largest)
    index = {key: position for position, key in enumerate(order)}
    return tuple(largest[key] for key in order), {b: index[key] for b, key in ranks.items()}
