"""`pool_plan` of a `memory.json` read into rows: padding and waste per unit, areas of pools."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError


class _Read(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)


class PlannedBucket(_Read):
    """A buffer that a unit asks for. waste_bytes: of its area, what it does not need."""

    role: str
    unit: str
    bucket: str
    dtype: str
    bytes: int
    padding_bytes: int
    placement: str
    slot: int | None = None
    offset_bytes: int | None = None
    waste_bytes: int = 0


class PlannedArea(_Read):
    """A stretch of every slot of a pool, for buffers in one role."""

    role: str
    dtype: str
    bytes: int


class PlannedPool(_Read):
    """`offsets`: where each area begins in a slot, in bytes."""

    role: str
    slots: int
    areas: tuple[PlannedArea, ...]
    offsets: tuple[int, ...]


class PoolPlanDocument(_Read):
    """All of it that is shown."""

    pools: tuple[PlannedPool, ...] = ()
    units: tuple[PlannedBucket, ...] = ()


def read_pool_plan(memory: Mapping[str, Any] | None) -> PoolPlanDocument | None:
    """None where there is no plan that can be understood."""
    try:
        return PoolPlanDocument.model_validate((memory or {}).get("pool_plan"))
    except ValidationError:
        return None


def alike(buckets: Sequence[PlannedBucket]) -> list[list[PlannedBucket]]:
    """Buckets in order, those that differ only in unit, bucket name and slot put together."""
    groups: dict[PlannedBucket, list[PlannedBucket]] = {}
    for bucket in buckets:
        key = bucket.model_copy(update={"unit": "", "bucket": "", "slot": None})
        groups.setdefault(key, []).append(bucket)
    return list(groups.values())


def seated(plan: PoolPlanDocument, pool: PlannedPool, area: int) -> list[PlannedBucket]:
    """Buckets that use area number `area` of a slot of `pool`, the largest first."""
    users = [
        bucket
        for bucket in plan.units
        if bucket.role == pool.areas[area].role
        and bucket.placement == "pool"
        and bucket.dtype == pool.areas[area].dtype
        and bucket.offset_bytes == pool.offsets[area]
    ]
    return sorted(users, key=lambda bucket: -bucket.bytes)
