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
                                                 both, or offload
accumulator      S or I  main_grads   cycle, or  trainable; I where every microbatch reduces; model
                                      model      with a pool and no offload
host_gradient    O       main_grads   cycle      trainable, and offload
grad_bucket      S       grad_comm    reduction  trainable, and every microbatch reduces, or
                                                 gradients change dtype on their way to the wire
outer_bucket     S or I  grad_comm    reduction  trainable, an outer axis, and a change of dtype; I
                                                 where the optimizer is FLAT
grad_cast        O       main_params  step       trainable, the main gradient has another dtype
                                                 and is not handed over decoupled

With offload main weights, host gradients and casts of gradients are in host memory, and an
accumulator goes when it is final. Transports take scratch memory besides (role `peer_slices`),
which depends on them alone. Weights that modules compute with as codes have a `compute_weights` of
no elements, and `payload`s that are there as long as compute weights would be.
[Note: one copy] of `runtime/weight_buffers.py` says what the missing rows share storage with.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from mfsdp_core.plan.coordinate import Coordinate
from mfsdp_core.plan.dtype_policy import GroupDtypes
from mfsdp_core.plan.grouping import ROOT, BucketPlan
from mfsdp_core.plan.options import AllocationConfig
from mfsdp_core.plan.payload import WEIGHTS, Payload
from mfsdp_core.plan.pools import Buffer, Lifetime, PoolPlan, Role, plan_pool
from mfsdp_core.plan.strategy import Collective, Placement, Strategy

Category = Literal[
    "main_weights",
    "compute_weights",
    "gradients",
    "communication_buffers",
    "optimizer_state",
]
CATEGORIES: tuple[Category, ...] = get_args(Category)

PooledRole = Literal["compute_weights", "grad_bucket", "outer_bucket"]
#: What is gathered sits in the slot of the weights that it becomes.
POOL_OF_ROLE: Mapping[Role, PooledRole] = {
    "compute_weights": "compute_weights",
    "payload": "compute_weights",
    "grad_bucket": "grad_bucket",
    "outer_bucket": "outer_bucket",
}

CATEGORY_OF_ROLE: Mapping[Role, Category] = {
    "main_weights": "main_weights",
    "compute_weights": "compute_weights",
    "compute_shard": "compute_weights",
    "payload_shard": "compute_weights",
    "accumulator": "gradients",
    "host_gradient": "gradients",
    "grad_cast": "gradients",
    "payload": "communication_buffers",
    "grad_bucket": "communication_buffers",
    "outer_bucket": "communication_buffers",
    "peer_slices": "communication_buffers",
}

#: What an offloaded model has in host memory.
ON_HOST: frozenset[Role] = frozenset({"main_weights", "host_gradient", "grad_cast"})

#: Slots that a pool needs at most: one outer reduction is waited for before the next is started.
MOST_SLOTS: Mapping[PooledRole, int] = {"outer_bucket": 1}


@dataclass(frozen=True)
class BucketBuffers:
    """The table of one bucket on one rank. owned: the slices that it optimizes."""

    plan: BucketPlan
    rows: tuple[Buffer, ...]
    owned: range

    def find(self, role: Role, payload: str = "") -> Buffer | None:
        """The buffer in that role; None where the bucket has none."""
        return next((r for r in self.rows if (r.role, r.payload) == (role, payload)), None)


def plan_buffers(
    plan: BucketPlan,
    strategy: Strategy,
    coordinate: Coordinate,
    dtypes: GroupDtypes[str],
    payloads: Sequence[Payload] = (),
    *,
    decoupled: bool = False,
    pooled: bool = False,
    offload: bool = False,
) -> BucketBuffers:
    """The rows of `plan` on the rank at `coordinate`, by the table of the module.

    payloads: of the codec of its weights; none, or `WEIGHTS` alone, where they travel as they are.
    decoupled: gradients are handed over in their own dtype, and never cast. pooled: the model has a
    pool, with which no buffer moves, so accumulators stay too. offload: see `Options`.
    """
    extents = _Extents(plan, strategy, coordinate)
    encoded = [payload for payload in payloads if payload.name != WEIGHTS]
    rows = [*_weights(extents, dtypes, encoded, pooled=pooled, offload=offload)]
    if plan.requires_grad:
        rows += _gradients(extents, dtypes, decoupled=decoupled, pooled=pooled, offload=offload)
    if offload:
        rows = [row._replace(where="host") if row.role in ON_HOST else row for row in rows]
    return BucketBuffers(plan, tuple(rows), extents.owned)


class _Extents:
    """Slices of the layout that one rank holds in each of the three ways."""

    def __init__(self, plan: BucketPlan, strategy: Strategy, coordinate: Coordinate) -> None:
        def held(outer: Placement, inner: Placement) -> range:
            return coordinate.range_of(plan.layout.slices, outer, inner)

        self.plan, self.strategy = plan, strategy
        self.has_outer_axis = coordinate.has_outer_axis
        self.whole = held(Placement.REPLICATE, Placement.REPLICATE)
        self.inner = held(Placement.REPLICATE, Placement.FLAT)
        self.optimizers = held(Placement.REPLICATE, strategy.inner.optimizer)
        self.owned = held(strategy.outer.optimizer, strategy.inner.optimizer)

    def row(
        self,
        role: Role,
        slices: range,
        dtype: str,
        lifetime: Lifetime = "model",
        *,
        is_sent: bool = True,
    ) -> Buffer:
        plan, layout = self.plan, self.plan.layout
        padding = len(slices) * layout.slice_elements - layout.used_in(slices)
        held = (slices, layout.slice_elements)
        return Buffer(plan.unit, plan.name, role, dtype, *held, lifetime, "", padding, is_sent)

    def payload(self, role: Role, slices: range, of: Payload, lifetime: Lifetime) -> Buffer:
        held = (slices, of.slice_elements)
        where = (self.plan.unit, self.plan.name, role, of.dtype)
        return Buffer(*where, *held, lifetime, of.name)


def _weights(
    of: _Extents,
    dtypes: GroupDtypes[str],
    encoded: Sequence[Payload],
    *,
    pooled: bool,
    offload: bool,
) -> Iterator[Buffer]:
    inner, outer = of.strategy.inner, of.strategy.outer
    comes_and_goes = inner.gathers_every_use and of.plan.unit != ROOT
    is_stale = inner.gathers_every_use and not (pooled or of.plan.primary)
    of_root: Lifetime = "version" if is_stale else "model"
    full = range(0) if of.plan.primary else of.whole
    yield of.row("compute_weights", full, dtypes.compute, "use" if comes_and_goes else of_root)
    collects = inner.gathers_every_use and outer.shards_optimizer
    if collects and not encoded:
        yield of.row("compute_shard", of.inner, dtypes.compute)
    for payload in encoded:
        yield of.payload("payload_shard", of.optimizers, payload, "model")
        if inner.weight_refresh is not Collective.NONE:
            lasts: Lifetime = payload.lifetime
            if lasts == "use" and not comes_and_goes:
                lasts = "model"
            yield of.payload("payload", of.whole, payload, lasts)
    serves_as_both = inner.gathers_every_use and not (collects or encoded)
    if encoded or not dtypes.shares_weights or serves_as_both or offload:
        is_sent = serves_as_both and dtypes.shares_weights and not offload
        yield of.row("main_weights", of.owned, dtypes.main_params, is_sent=is_sent)


def _gradients(
    of: _Extents, dtypes: GroupDtypes[str], *, decoupled: bool, pooled: bool, offload: bool
) -> Iterator[Buffer]:
    inner, comm = of.strategy.inner, dtypes.grad_comm
    every_microbatch = inner.reduces_every_microbatch
    accumulated = of.inner if every_microbatch else of.whole
    stays = pooled and not offload
    yield of.row("accumulator", accumulated, dtypes.main_grads, "model" if stays else "cycle")
    if offload:
        yield of.row("host_gradient", of.owned, dtypes.main_grads, "cycle", is_sent=False)
    if every_microbatch or dtypes.needs_comm_buffer:
        yield of.row("grad_bucket", of.whole, comm, "reduction")
    if of.has_outer_axis and dtypes.needs_comm_buffer:
        yield of.row("outer_bucket", of.optimizers, comm, "reduction")
    if dtypes.casts_gradient and not decoupled:
        yield of.row("grad_cast", of.owned, dtypes.main_params, "step", is_sent=False)


def transient_rows(tables: Iterable[BucketBuffers]) -> dict[PooledRole, list[Buffer]]:
    """What units take while they are at work, by pool, in the order of `tables`."""
    found: dict[PooledRole, list[Buffer]] = {}
    for row in (row for table in tables for row in table.rows):
        if row.role in POOL_OF_ROLE and row.lifetime != "model" and row.elements:
            found.setdefault(POOL_OF_ROLE[row.role], []).append(row)
    return found


def plan_pools(
    config: AllocationConfig, requests: Mapping[PooledRole, Sequence[Buffer]]
) -> dict[PooledRole, PoolPlan]:
    """The pool of every role that has one: none where the allocator is no pool."""
    if config.pool is None:
        return {}
    return {
        role: plan_pool(config.pool, rows, MOST_SLOTS.get(role, config.slots))
        for role, rows in requests.items()
    }
