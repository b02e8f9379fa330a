"""Planning of buffer pools: how many slots, of which areas, and who sits where. Pure.

A pool has `slots` equal slots that units use one after another. A slot is a row of areas; the
j-th largest bucket of a unit (per dtype) sits in area j of that dtype:

    areas of a slot      bfloat16[0]         bfloat16[1]   float32[0]
    slot 0             |################|  |#########|    |####|
    slot 1             |################|  |#########|    |####|
    unit "attention"    ##########......    ######...      ####       . waste
    unit "mamba"        ################    #########

[Note: smallest pool] With area j as large as the largest j-th largest bucket of any unit, every
unit fits and no pool that every unit fits is smaller: sorted by size, its j-th area has to take the
j-th largest bucket of each unit.

Sizes are padded sizes, those of the buffers themselves: two units with equal parameters may differ
in padding, and an area must never have to grow (1.7 of the specification).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

PoolKind = Literal["fixed_pool", "max_pool"]


@dataclass(frozen=True)
class BucketRequest:
    """A buffer that a unit will ask for.

    elements: padded size. padding_elements: the part of it that belongs to no parameter.
    item_bytes: size of one element of `dtype`.
    """

    unit: str
    bucket: str
    dtype: str
    elements: int
    item_bytes: int
    padding_elements: int = 0

    @property
    def size_bytes(self) -> int:
        """Bytes of the buffer."""
        return self.elements * self.item_bytes


@dataclass(frozen=True)
class Area:
    """A stretch of every slot, for one bucket at a time."""

    dtype: str
    elements: int
    item_bytes: int

    @property
    def size_bytes(self) -> int:
        """Bytes of the area in one slot."""
        return self.elements * self.item_bytes


@dataclass(frozen=True)
class PoolPlan:
    """Where every bucket of the pooled units sits.

    homes: unit -> slot that it takes first (unit k takes slot k modulo `slots`). area_of: bucket ->
    index of its area. outside: requests that no slot serves.
    """

    slots: int
    areas: tuple[Area, ...]
    homes: dict[str, int]
    area_of: dict[str, int]
    served: tuple[BucketRequest, ...]
    outside: tuple[BucketRequest, ...]

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
        return tuple(
            sum(area.size_bytes for area in self.areas[:index]) for index in range(len(self.areas))
        )


def plan_pool(kind: PoolKind, requests: Sequence[BucketRequest], slots: int) -> PoolPlan:
    """Plan a pool for `requests` of units, given in registration order of the units.

    `max_pool` serves every unit. `fixed_pool` serves the units of the most frequent signature (the
    sorted dtypes and sizes of a unit's buckets; of equally frequent ones that with the most bytes,
    then the first) and leaves the others outside. There are never more slots than units served.
    """
    by_unit: dict[str, list[BucketRequest]] = {}
    for request in requests:
        by_unit.setdefault(request.unit, []).append(request)
    served = by_unit if kind == "max_pool" else _largest_class(by_unit)
    inside = tuple(r for r in requests if r.unit in served)
    outside = tuple(r for r in requests if r.unit not in served)
    slots = min(slots, len(served))
    homes = {unit: index % slots for index, unit in enumerate(served)}
    areas, area_of = _areas_by_bucket(served.values())
    return PoolPlan(slots, areas, homes, area_of, inside, outside)


def _largest_class(
    by_unit: dict[str, list[BucketRequest]],
) -> dict[str, list[BucketRequest]]:
    classes: dict[tuple[tuple[str, int], ...], list[str]] = {}
    for unit, requests in by_unit.items():
        signature = tuple(sorted((r.dtype, r.elements) for r in requests))
        classes.setdefault(signature, []).append(unit)
    if not classes:
        return {}

    def weight(units: list[str]) -> tuple[int, int]:
        return len(units), sum(r.size_bytes for r in by_unit[units[0]])

    best = max(classes.values(), key=weight)
    return {unit: by_unit[unit] for unit in best}


def _areas_by_bucket(
    units: Iterable[list[BucketRequest]],
) -> tuple[tuple[Area, ...], dict[str, int]]:
    """Areas by [Note: smallest pool], and the area of every bucket."""
    largest: dict[tuple[str, int], Area] = {}
    ranks: dict[str, tuple[str, int]] = {}
    for requests in units:
        # Sorting is stable, so equal sizes keep the order of the buckets on every rank.
        ordered = sorted(requests, key=lambda r: (r.dtype, -r.elements))
        for dtype, same in groupby(ordered, key=lambda r: r.dtype):
            for rank, request in enumerate(same):
                ranks[request.bucket] = (dtype, rank)
                area = largest.get((dtype, rank))
                if area is None or area.elements < request.elements:
                    largest[dtype, rank] = Area(dtype, request.elements, request.item_bytes)
    order = sorted(largest)
    index = {key: position for position, key in enumerate(order)}
    return tuple(largest[key] for key in order), {b: index[key] for b, key in ranks.items()}
