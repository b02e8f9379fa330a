"""The allocators of one model, one per purpose, and the plan of its pools as data.

Weights, gradients and buckets of the outer reduction have pools of their own: releasing one kind
can never starve another, and an inner bucket is given back before an outer one is requested.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from mfsdp_core.comm.torch_backend import dtype_name
from mfsdp_core.memory.allocators import Allocator, DBuffer, carve
from mfsdp_core.memory.ledger import MemoryLedger
from mfsdp_core.memory.pools import SlotPool
from mfsdp_core.plan.buffers import (
    POOL_OF_ROLE,
    BucketBuffers,
    plan_pools,
    transient_rows,
)
from mfsdp_core.plan.dtype_policy import element_bytes
from mfsdp_core.plan.layout import Layout
from mfsdp_core.plan.options import AllocationConfig
from mfsdp_core.plan.pools import Buffer, Lifetime, Role
from mfsdp_core.streams import Streams

#: A little less than the 32 MB up to which glibc adapts.
_LARGEST_KEPT_BYTES = 2**25 - 2**16


class Allocators:
    """Makes buffers, and knows who serves which; pools are allocated with it, once.

    lasting: what stays for the model's life. host: what is in host memory. by_role: transient
    buffers that no slot serves; those of other roles are fresh ones. Who has kept a gradient over
    `zero_grad`, which gives its memory back, then has its numbers still, as with plain torch.
    requests: transient buffers of units. factors: that gradients are scaled by, made once.
    """

    def __init__(
        self,
        config: AllocationConfig,
        tables: Sequence[BucketBuffers],
        *,
        streams: Streams,
        ledger: MemoryLedger,
    ) -> None:
        _keep_freed_memory(streams)
        self.config, self.streams = config, streams
        self.lasting = Allocator(streams, ledger, "tensor")
        self.fresh, self.host = Allocator(streams, ledger), Allocator(streams, ledger, on_host=True)
        self.requests = transient_rows(tables)
        self.by_role: dict[Role, Allocator] = {"payload": self.lasting}
        if config.pool is not None:
            # Never fresh: autograd may hold views of what no slot serves (R12).
            fallback = self.by_role["peer_slices"] = Allocator(streams, ledger, "tensor")
            if config.persistent_fallback:
                fallback = Allocator(streams, ledger, "memory")
            self.by_role |= dict.fromkeys(POOL_OF_ROLE, fallback)
        elif config.allocator == "storage_resize":
            self.by_role["compute_weights"] = self.lasting
        self.pools: dict[Role, SlotPool] = {
            role: SlotPool(role, plan, streams=streams, ledger=ledger)
            for role, plan in plan_pools(config, self.requests).items()
        }
        self.factors: dict[tuple[float, torch.dtype], torch.Tensor] = {}
        self._made: dict[Buffer, DBuffer] = {}

    def buffer(self, table: BucketBuffers, role: Role, payload: str = "") -> DBuffer:
        """The one buffer of a row that the table is known to have."""
        row = table.find(role, payload)
        assert row is not None, f"{table.plan.name} has no buffer {role} {payload}"
        return self._buffer(row, table.plan.layout)

    def find(self, table: BucketBuffers, role: Role) -> DBuffer | None:
        """As `buffer`; None where the table has no such row."""
        row = table.find(role)
        return None if row is None else self._buffer(row, table.plan.layout)

    def scratch(self, bucket: str, elements: int, dtype: torch.dtype) -> DBuffer:
        """`mfsdp_core.comm.torch_backend.Scratch`: slices that arrive from other ranks.

        At most one per bucket, size and dtype is out at a time, as reductions of one bucket follow
        one another.
        """
        name, one = dtype_name(dtype), range(1)
        buffer = self._buffer(Buffer("", bucket, "peer_slices", name, one, elements, "reduction"))
        buffer.take()
        return buffer

    def _buffer(self, row: Buffer, layout: Layout | None = None) -> DBuffer:
        if row not in self._made:
            allocator = self.by_role.get(row.role, self.fresh)
            if row.where == "host":
                allocator = self.host
            elif row.lifetime in ("model", "version") or not row.elements:
                allocator = self.lasting
            elif (pool := self._pool_of(row)) is not None:
                allocator = pool
            self._made[row] = DBuffer(row, allocator, layout)
        return self._made[row]

    def reserve(self, tables: Sequence[BucketBuffers]) -> None:
        """Allocate what is sent and never given back, in one piece per role and lifetime."""
        kinds: dict[tuple[Role, Lifetime], list[DBuffer]] = {}
        for table in tables:
            for row in table.rows:
                buffer = self._buffer(row, table.plan.layout)
                keeps = buffer.allocator.leaves == "memory"
                if row.is_sent and row.elements and (keeps or buffer.allocator is self.lasting):
                    kinds.setdefault((row.role, row.lifetime), []).append(buffer)
        for kind in kinds.values():
            for buffer, data in zip(kind, carve(self.streams, [b.row for b in kind]), strict=True):
                buffer.data = data

    def _pool_of(self, row: Buffer) -> SlotPool | None:
        return next((pool for pool in self.pools.values() if row in pool.plan.area_of), None)

    def plan_document(self) -> dict[str, Any]:
        """The pools and every bucket that units ask for, as plain data; see `mfsdp_core/README`."""
        return {
            "allocator": self.config.allocator,
            "pools": [_pool_entry(pool) for pool in self.pools.values()],
            "units": [self._unit_entry(row) for rows in self.requests.values() for row in rows],
        }

    def _unit_entry(self, row: Buffer) -> dict[str, Any]:
        pool = self._pool_of(row)
        placement, slot, offset, waste = self._elsewhere(row.role), None, None, 0
        if pool is not None:
            area = pool.plan.area_of[row]
            placement, slot = "pool", pool.assigned_slot(row.unit)
            slot = pool.plan.homes[row.unit] if slot is None else slot
            offset = pool.plan.offsets_bytes[area]
            waste = pool.plan.areas[area].size_bytes - row.size_bytes
        return {
            "role": row.role,
            "unit": row.unit,
            "bucket": row.bucket,
            "dtype": row.dtype,
            "bytes": row.size_bytes,
            "padding_bytes": row.padding_elements * element_bytes(row.dtype),
            "placement": placement,
            "slot": slot,
            "offset_bytes": offset,
            "waste_bytes": waste,
        }

    def _elsewhere(self, role: Role) -> str:
        """Where buckets of `role` go that no slot serves."""
        if self.config.pool is not None:
            return "persistent" if self.config.persistent_fallback else "storage_resize"
        named = {"compute_weights": self.config.allocator, "payload": "storage_resize"}
        return named.get(role, "temporary")


def _keep_freed_memory(streams: Streams) -> None:
    """Let the C library keep buffers that come and go, up to 32 MB each.

    glibc takes the size of a block that is freed as a sign of what will be requested again; smaller
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
            {"role": a.role, "dtype": a.dtype, "elements": a.elements, "bytes": a.size_bytes}
            for a in plan.areas
        ],
        "offsets": list(plan.offsets_bytes),
        "slot_bytes": plan.slot_bytes,
        "bytes": plan.size_bytes,
    }
