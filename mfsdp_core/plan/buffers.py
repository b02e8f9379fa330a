"""The one table of memory: which buffers a bucket has on a rank, how large, and for how long. Pure.

The weight and gradient buffers allocate its rows, the memory model sums them, and the planner of
pools shares them out. S: all slices of the bucket's layout. I: this rank's inner slice. O: what its
optimizer updates (S, I, or the rank's sub-shard of I).

role             extent  dtype        lifetime   where
compute_weights  S       compute      use        parameter FLAT, and not of the root
                                      version    parameter FLAT, of the root, without a pool
                                      model      elsewhere
compute_shard    I       compute      model      parameter FLAT, the outer axis shards the
                                                 optimizer, and weights travel as they are
payload_shard    S or I  of payload   model      per payload of encoded weights; I where the
                                                 optimizer is FLAT
payload          S       of payload   gather,    the same, where weights are gathered at all
                                      or use,    while modules compute with them
                                      or model
main_weights     O       main_params  model      main and compute dtypes differ, or weights are
                                                 encoded, or a shard of FLAT parameters serves as
                                                 both
accumulator      S or I  main_grads   cycle, or  trainable; I where every microbatch reduces; model
                                      model      with a pool
grad_bucket      S       grad_comm    reduction  trainable, and every microbatch reduces, or
                                                 gradients change dtype on their way to the wire
outer_bucket     S or I  grad_comm    reduction  trainable, an outer axis, and a change of dtype; I
                                                 where the optimizer is FLAT
grad_cast        O       main_params  step       trainable, the main gradient has another dtype
                                                 and is not handed over decoupled

Transports take scratch memory besides (role `peer_slices`), which depends on them alone. Weights
that modules compute with as codes have a `compute_weights` of no elements, and `payload`s that are
there as long as compute weights would be.
[Note: one copy] of `runtime/weight_buffers.py` says what the missing rows share storage with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from mfsdp_core.plan.coordinate import Coordinate
from mfsdp_core.plan.dtype_policy import GroupDtypes
from mfsdp_core.plan.grouping import ROOT, BucketPlan
from mfsdp_core.plan.layout import Layout, Slot
from mfsdp_core.plan.options import AllocationConfig
from mfsdp_core.plan.payload import WEIGHTS, Payload
from mfsdp_core.plan.pools import BucketRequest, PoolPlan, plan_pool
from mfsdp_core.plan.strategy import Collective, Strategy

Category = Literal[
    "main_weights",
    "compute_weights",
    "gradients",
    "communication_buffers",
    "optimizer_state",
]
CATEGORIES: tuple[Category, ...] = get_args(Category)

PooledRole = Literal["compute_weights", "grad_bucket", "outer_bucket"]
POOLED_ROLES: tuple[PooledRole, ...] = get_args(PooledRole)
Role = Literal[
    PooledRole,
    "main_weights",
    "compute_shard",
    "payload_shard",
    "payload",
    "accumulator",
    "grad_cast",
    "peer_slices",
]

CATEGORY_OF_ROLE: Mapping[Role, Category] = {
    "main_weights": "main_weights",
    "compute_weights": "compute_weights",
    "compute_shard": "compute_weights",
    "payload_shard": "compute_weights",
    "accumulator": "gradients",
    "grad_cast": "gradients",
    "payload": "communication_buffers",
    "grad_bucket": "communication_buffers",
    "outer_bucket": "communication_buffers",
    "peer_slices": "communication_buffers",
}

#: model: from sharding on. use: from a gather to the release of the unit. gather: until what was
#: gathered is decoded. reduction: from the first gradient until the result has landed. cycle: from
#: the first gradient of a cycle to `zero_grad`. step: from the end of the cycle's reduction to it.
#: version: from a gather, of plain weights from sharding on, until main weights change.
Lifetime = Literal["model", "use", "gather", "reduction", "cycle", "step", "version"]

#: Slots that a pool needs at most: one outer reduction is waited for before the next is started.
MOST_SLOTS: Mapping[PooledRole, int] = {"outer_bucket": 1}


@dataclass(frozen=True, slots=True)
class Buffer:
    """One row of the table: `slices` equal slices of a bucket, from `first_slice` on.

    dtype: torch's name without prefix. slice_elements: of one slice. payload: which one of the
    encoded weights; "" of everything else.
    """

    role: Role
    dtype: str
    first_slice: int
    slices: int
    slice_elements: int
    lifetime: Lifetime
    payload: str = ""

    @property
    def elements(self) -> int:
        """Size of the buffer."""
        return self.slices * self.slice_elements

    @property
    def extent(self) -> tuple[int, int]:
        """Elements [start, end) of the whole that the buffer holds."""
        start = self.first_slice * self.slice_elements
        return start, start + self.elements


@dataclass(frozen=True)
class BucketBuffers:
    """The table of one bucket on one rank. owned: elements [start, end) that it optimizes."""

    plan: BucketPlan
    rows: tuple[Buffer, ...]
    owned: tuple[int, int]

    def find(self, role: Role, payload: str = "") -> Buffer | None:
        """The buffer in that role; None where the bucket has none."""
        return next((r for r in self.rows if (r.role, r.payload) == (role, payload)), None)

    def get(self, role: Role, payload: str = "") -> Buffer:
        """The buffer in a role that the bucket is known to have.

        Raises:
            KeyError: it has not.
        """
        found = self.find(role, payload)
        if found is None:
            raise KeyError(f"{self.plan.name} has no buffer {role} {payload}".rstrip())
        return found

    def used_elements(self, row: Buffer) -> int:
        """Elements of a buffer that belong to parameters; of a payload all of them."""
        return row.elements if row.payload else used_elements(self.plan.layout, *row.extent)


def plan_buffers(
    plan: BucketPlan,
    strategy: Strategy,
    coordinate: Coordinate,
    dtypes: GroupDtypes[str],
    payloads: Sequence[Payload] = (),
    *,
    decoupled: bool = False,
    pooled: bool = False,
) -> BucketBuffers:
    """The rows of `plan` on the rank at `coordinate`, by the table of the module.

    payloads: of the codec of its weights; none, or `WEIGHTS` alone, where they travel as they are.
    decoupled: gradients are handed over in their own dtype, and never cast. pooled: the model has a
    pool, with which no buffer moves, so accumulators stay too.
    """
    extents = _Extents(plan, strategy, coordinate)
    encoded = [payload for payload in payloads if payload.name != WEIGHTS]
    rows = [*_weights(extents, dtypes, encoded, pooled=pooled)]
    if plan.requires_grad:
        rows += _gradients(extents, dtypes, decoupled=decoupled, pooled=pooled)
    first, slices = extents.owned
    size = plan.layout.slice_elements
    return BucketBuffers(plan, tuple(rows), (first * size, (first + slices) * size))


def used_elements(layout: Layout, start: int, end: int) -> int:
    """Elements of parameters within [start, end) of the flat buffer."""
    return sum(used_of_slot(slot, start, end) for slot in layout.slots)


def used_of_slot(slot: Slot, start: int, end: int) -> int:
    """Elements of one parameter within [start, end) of the flat buffer."""
    return max(0, min(slot.end, end) - max(slot.offset, start))


@dataclass(frozen=True)
class _Extents:
    """Slices of the layout that one rank holds in each of the three ways."""

    plan: BucketPlan
    strategy: Strategy
    coordinate: Coordinate

    @property
    def whole(self) -> tuple[int, int]:
        return 0, self.plan.layout.slices

    @property
    def inner(self) -> tuple[int, int]:
        slices = self.plan.layout.slices // self.coordinate.inner_size
        return self.coordinate.inner_rank * slices, slices

    @property
    def owned(self) -> tuple[int, int]:
        if not self.strategy.inner.shards_optimizer:
            return self.whole
        if not self.strategy.outer.shards_optimizer:
            return self.inner
        return self.coordinate.sub_shard(self.strategy), 1

    def row(
        self, role: Role, extent: tuple[int, int], dtype: str, lifetime: Lifetime = "model"
    ) -> Buffer:
        return Buffer(role, dtype, *extent, self.plan.layout.slice_elements, lifetime)


def _weights(
    of: _Extents, dtypes: GroupDtypes[str], encoded: Sequence[Payload], *, pooled: bool
) -> Iterator[Buffer]:
    inner, outer = of.strategy.inner, of.strategy.outer
    comes_and_goes = inner.gathers_every_use and of.plan.unit != ROOT
    is_stale = inner.gathers_every_use and not (pooled or of.plan.primary)
    of_root: Lifetime = "version" if is_stale else "model"
    full = (0, 0) if of.plan.primary else of.whole
    yield of.row("compute_weights", full, dtypes.compute, "use" if comes_and_goes else of_root)
    collects = inner.gathers_every_use and outer.shards_optimizer
    if collects and not encoded:
        yield of.row("compute_shard", of.inner, dtypes.compute)
    source = of.inner if inner.shards_optimizer else of.whole
    for payload in encoded:
        size = payload.slice_elements
        yield Buffer("payload_shard", payload.dtype, *source, size, "model", payload.name)
        if inner.weight_refresh is not Collective.NONE:
            lasts: Lifetime = payload.lifetime
            if lasts == "use" and not comes_and_goes:
                lasts = "model"
            yield Buffer("payload", payload.dtype, *of.whole, size, lasts, payload.name)
    serves_as_both = inner.gathers_every_use and not collects
    if encoded or not dtypes.shares_weights or serves_as_both:
        yield of.row("main_weights", of.owned, dtypes.main_params)


def _gradients(
    of: _Extents, dtypes: GroupDtypes[str], *, decoupled: bool, pooled: bool
) -> Iterator[Buffer]:
    inner, comm = of.strategy.inner, dtypes.grad_comm
    every_microbatch = inner.reduces_every_microbatch
    accumulated = of.inner if every_microbatch else of.whole
    yield of.row("accumulator", accumulated, dtypes.main_grads, "model" if pooled else "cycle")
    if every_microbatch or dtypes.needs_comm_buffer:
        yield of.row("grad_bucket", of.whole, comm, "reduction")
    if of.coordinate.has_outer_axis and dtypes.needs_comm_buffer:
        reduced = of.inner if inner.shards_optimizer else of.whole
        yield of.row("outer_bucket", reduced, comm, "reduction")
    if dtypes.casts_gradient and not decoupled:
        yield of.row("grad_cast", of.owned, dtypes.main_params, "step")


def pool_requests(
    tables: Iterable[BucketBuffers], item_bytes: Callable[[str], int]
) -> dict[PooledRole, list[BucketRequest]]:
    """What units ask the allocators for while they are at work, by role, in the order of `tables`.

    item_bytes: size of one element, by name of the dtype.
    """
    requests: dict[PooledRole, list[BucketRequest]] = {}
    for table in tables:
        for role in POOLED_ROLES:
            row = table.find(role)
            if row is None or row.lifetime == "model" or not row.elements:
                continue
            request = BucketRequest(
                unit=table.plan.unit,
                bucket=table.plan.name,
                dtype=row.dtype,
                elements=row.elements,
                item_bytes=item_bytes(row.dtype),
                padding_elements=row.elements - table.used_elements(row),
            )
            requests.setdefault(role, []).append(request)
    return requests


def plan_pools(
    config: AllocationConfig, requests: Mapping[PooledRole, Sequence[BucketRequest]]
) -> dict[PooledRole, PoolPlan]:
    """The pool of every role that has one: none where the allocator is no pool.

    The root's buckets are asked for once per pass: no slot is planned for them.
    """
    if config.pool is None:
        return {}
    found = {}
    for role in POOLED_ROLES:
        slots = MOST_SLOTS.get(role, config.slots)
        of_units = [request for request in requests.get(role, ()) if request.unit != ROOT]
        plan = plan_pool(config.pool, of_units, slots)
        if plan.areas:
            found[role] = plan
    return found
