"""Which allocator serves transient buffers: the arguments about it, parsed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from mfsdp_core.errors import ConfigurationError
from mfsdp_core.plan.pools import PoolKind

AllocatorName = Literal["temporary", "storage_resize", "fixed_pool", "max_pool"]

#: In the backward pass a unit is gathered before the one that ran before it is released, and a
#: bucket fills while another is being reduced.
SMALLEST_POOL_SLOTS = 2


@dataclass(frozen=True)
class RegistrationConfig:
    """How memory is registered. manual: the caller says when."""

    symmetric: bool = True
    manual: bool = False


@dataclass(frozen=True)
class AllocationConfig:
    """Allocator of compute weights, gradient buckets and buckets of the outer reduction.

    slots: of every pool; other allocators have none. persistent_fallback: units that no slot serves
    get buffers that are never freed, instead of storage that is resized. registration: of what
    collectives use, with NCCL; None is none.
    """

    allocator: AllocatorName = "storage_resize"
    slots: int = SMALLEST_POOL_SLOTS
    persistent_fallback: bool = False
    registration: RegistrationConfig | None = None

    @property
    def pool(self) -> PoolKind | None:
        """The kind of pool, None for allocators that are none."""
        return self.allocator if self.allocator in get_args(PoolKind) else None  # type: ignore[return-value]


def parse_allocation(
    allocator: AllocatorName | None,
    pool_slots: int,
    *,
    double_buffer: bool,
    max_pool: bool,
    persistent_fallback: bool,
    registration: RegistrationConfig | None = None,
) -> AllocationConfig:
    """From `allocator`, or from upstream's flags where it is None.

    `fsdp_double_buffer` is the fixed pool, `maxpool_double_buffer` the max pool, also alone, as
    under upstream.

    Raises:
        ConfigurationError: an unknown allocator, too few slots, or arguments that contradict.
    """
    implied: AllocatorName = (
        "max_pool" if max_pool else "fixed_pool" if double_buffer else "storage_resize"
    )
    chosen = implied if allocator is None else allocator
    if chosen not in get_args(AllocatorName):
        raise ConfigurationError(
            f"allocator={allocator!r}: expected one of {', '.join(get_args(AllocatorName))}."
        )
    flags = double_buffer or max_pool
    if flags and chosen != implied and not (chosen == "max_pool" and double_buffer):
        raise ConfigurationError(
            f"allocator={allocator!r} contradicts fsdp_double_buffer={double_buffer} "
            f"(or nccl_ub), maxpool_double_buffer={max_pool}, which mean {implied!r}. Give one of "
            "them."
        )
    config = AllocationConfig(chosen, pool_slots, persistent_fallback, registration)
    if config.pool and pool_slots < SMALLEST_POOL_SLOTS:
        raise ConfigurationError(
            f"pool_slots={pool_slots}: a pool needs {SMALLEST_POOL_SLOTS} slots at least, one for "
            "the unit that runs and one for its neighbour."
        )
    if persistent_fallback and config.pool is None:
        raise ConfigurationError(
            "fsdp_db_use_persist_buf_on_alloc_fail=True is about units that no slot of a pool "
            f"serves, and allocator={chosen!r} is none. Use fsdp_double_buffer=True, or leave it."
        )
    return config
