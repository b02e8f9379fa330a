"""The allocators of one model, one per purpose, and the plan of its pools as data.

Weights, gradients and buckets of the outer reduction have pools of their own: releasing one kind
can never starve another, and an inner bucket is given back before an outer one is asked for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from mfsdp_core.memory.allocators import (
    BucketAllocator,
    PersistentAllocator,
    StorageResizeAllocator,
    TemporaryAllocator,
)
from mfsdp_core.memory.ledger import MemoryLedger
from mfsdp_core.memory.pools import SlotPool
from mfsdp_core.plan.buffers import POOLED_ROLES, PooledRole, Role, plan_pools
from mfsdp_core.plan.options import AllocationConfig
from mfsdp_core.plan.pools import BucketRequest
from mfsdp_core.streams import Streams

#: A little less than the 32 MB up to which glibc adapts.
_LARGEST_KEPT_BYTES = 2**25 - 2**16


@dataclass
class Allocators:
    """Who serves which role. lasting: what stays for the model's life. casts: of gradients.

    factors: that gradients are scaled by, made once.
    """

    lasting: StorageResizeAllocator
    casts: TemporaryAllocator
    weights: BucketAllocator
    gradients: BucketAllocator
    outer: BucketAllocator
    scratch: BucketAllocator
    streams: Streams
    config: AllocationConfig
    requests: Mapping[PooledRole, Sequence[BucketRequest]]
    pools: dict[PooledRole, SlotPool] = field(default_factory=dict)
    factors: dict[tuple[float, torch.dtype], torch.Tensor] = field(default_factory=dict)

    @property
    def of_cycles(self) -> BucketAllocator:
        """Of accumulators, which `zero_grad` gives back: fresh ones, unless a pool lets none move.

        Who has kept a gradient over `zero_grad` then has its numbers still, as with plain torch.
        """
        return self.gradients if self.config.pool is None else self.lasting

    def plan_document(self) -> dict[str, Any]:
        """The pools and every bucket that units ask for, as plain data; see `mfsdp_core/README`."""
        return {
            "allocator": self.config.allocator,
            "pools": [_pool_entry(pool) for pool in self.pools.values()],
            "units": [
                self._unit_entry(role, request)
                for role, requests in self.requests.items()
                for request in requests
            ],
        }

    def _unit_entry(self, role: PooledRole, request: BucketRequest) -> dict[str, Any]:
        pool = self.pools.get(role)
        area = pool.plan.area_of.get(request.bucket) if pool is not None else None
        placement, slot, offset, waste = self._elsewhere(role), None, None, 0
        if pool is not None and area is not None:
            placement, slot = "pool", pool.assigned_slot(request.unit)
            slot = pool.plan.homes[request.unit] if slot is None else slot
            offset = pool.plan.offsets_bytes[area]
            waste = pool.plan.areas[area].size_bytes - request.size_bytes
        return {
            "role": role,
            "unit": request.unit,
            "bucket": request.bucket,
            "dtype": request.dtype,
            "bytes": request.size_bytes,
            "padding_bytes": request.padding_elements * request.item_bytes,
            "placement": placement,
            "slot": slot,
            "offset_bytes": offset,
            "waste_bytes": waste,
        }

    def _elsewhere(self, role: Role) -> str:
        """Where buckets of `role` go that no slot serves."""
        if self.config.pool is not None:
            return "persistent" if self.config.persistent_fallback else "storage_resize"
        return self.config.allocator if role == "compute_weights" else "temporary"


def build_allocators(
    config: AllocationConfig,
    requests: Mapping[PooledRole, Sequence[BucketRequest]],
    *,
    streams: Streams,
    ledger: MemoryLedger,
) -> Allocators:
    """Allocators for `requests` by role; pools are allocated here, once."""
    _keep_freed_memory(streams)
    lasting = StorageResizeAllocator(streams, ledger, lasts=True)
    transient = TemporaryAllocator(streams, ledger)
    if config.pool is None:
        weights = transient if config.allocator == "temporary" else lasting
        of_roles = (weights, transient, transient, transient)
        return Allocators(lasting, transient, *of_roles, streams, config, requests)
    # Never temporary: autograd may hold views of what no slot serves (R12).
    fallback: BucketAllocator = StorageResizeAllocator(streams, ledger)
    if config.persistent_fallback:
        fallback = PersistentAllocator(streams, ledger, lasts=True)
    pools: dict[PooledRole, SlotPool] = {}
    by_role: dict[PooledRole, BucketAllocator] = dict.fromkeys(POOLED_ROLES, fallback)
    for role, plan in plan_pools(config, requests).items():
        pool = SlotPool(role, plan, fallback, streams=streams, ledger=ledger)
        by_role[role] = pools[role] = pool
    return Allocators(
        lasting,
        transient,
        by_role["compute_weights"],
        by_role["grad_bucket"],
        by_role["outer_bucket"],
        StorageResizeAllocator(streams, ledger),
        streams,
        config,
        requests,
        pools,
    )


def _keep_freed_memory(streams: Streams) -> None:
    """Let the C library keep buffers that come and go, up to 32 MB each.

    glibc takes the size of a block that is freed as a sign of what will be asked for again; smaller
    ones then come from its heap rather than from the kernel, which hands out zeroed pages, one
    fault each. The block is never touched and takes no memory. Elsewhere nothing happens.
    """
    if streams.device.type == "cpu":
        # A tensor would be filled under torch.utils.deterministic.fill_uninitialized_memory.
        torch.UntypedStorage(_LARGEST_KEPT_BYTES)


def _pool_entry(pool: SlotPool) -> dict[str, Any]:
    plan = pool.plan
    return {
        "role": pool.role,
        "slots": plan.slots,
        "areas": [
            {"dtype": area.dtype, "elements": area.elements, "bytes": area.size_bytes}
            for area in plan.areas
        ],
        "offsets": list(plan.offsets_bytes),
        "slot_bytes": plan.slot_bytes,
        "bytes": plan.size_bytes,
    }
