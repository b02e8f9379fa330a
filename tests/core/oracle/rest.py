"""Bytes that a rank holds at rest: the rows of the core's table of buffers, added up here.

Between `zero_grad` and the next forward pass: rows that last as long as the model, and what an
allocator keeps. With gradients: at the optimizer's step, where they are attached as well.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from mfsdp_core.plan.buffers import (
    CATEGORIES,
    CATEGORY_OF_ROLE,
    BucketBuffers,
    plan_buffers,
    plan_pools,
    transient_rows,
)
from mfsdp_core.plan.coordinate import Coordinate
from mfsdp_core.plan.dtype_policy import element_bytes, resolve_dtypes
from mfsdp_core.plan.grouping import ParameterFacts, plan_buckets
from mfsdp_core.plan.options import AllocationConfig
from mfsdp_core.plan.payload import PayloadPlan
from mfsdp_core.plan.strategy import Strategy

#: Names of the dtypes of main weights, main gradients and communication.
Dtypes = tuple[str | None, str | None, str | None]


def bytes_at_rest(  # noqa: PLR0913 - each of them decides about bytes
    parameters: Sequence[ParameterFacts],
    strategy: Strategy,
    coordinate: Coordinate,
    dtypes: Dtypes = ("float32", None, None),
    *,
    experts: Coordinate | None = None,
    allocation: AllocationConfig | None = None,
    codec: PayloadPlan | None = None,
    gradients: bool = False,
    adam: bool = False,
) -> dict[str, int]:
    """By category of the ledger. experts: the coordinate on their mesh. adam: with its state."""
    allocation = allocation or AllocationConfig()
    found: Counter[str] = Counter(dict.fromkeys(CATEGORIES, 0))
    tables: list[BucketBuffers] = []
    slices = coordinate.sub_shards(strategy)
    of_experts = (experts or coordinate).sub_shards(strategy)
    for plan in plan_buckets(parameters, slices, expert_slices=of_experts, codec=codec):
        where = experts if experts is not None and plan.is_expert else coordinate
        named = resolve_dtypes(plan.dtype, *dtypes, trainable=plan.requires_grad)
        payloads = codec.payloads(plan.layout, plan.dtype) if codec and plan.is_encoded else ()
        pooled = allocation.pool is not None
        table = plan_buffers(plan, strategy, where, named, payloads, pooled=pooled)
        tables.append(table)
        for row in table.rows:
            # Encoded ones were never those of sharding.
            is_stale = (adam and plan.requires_grad) or (plan.is_encoded and not gradients)
            there = row.lifetime == "model" or (row.lifetime == "version" and not is_stale)
            if there or (gradients and row.lifetime in ("cycle", "step")):
                found[CATEGORY_OF_ROLE[row.role]] += row.size_bytes
        if adam and plan.requires_grad:  # two moments, and a counter for each parameter
            moments = 2 * plan.layout.used_in(table.owned)
            found["optimizer_state"] += moments * element_bytes(named.main_params)
            found["optimizer_state"] += 4 * len(plan.members)
    found.update(_kept(tables, allocation, stepped=gradients or adam))
    return dict(found)


def _kept(
    tables: Sequence[BucketBuffers], allocation: AllocationConfig, *, stepped: bool
) -> Counter[str]:
    """All slots of pools; what a unit without a slot keeps is there from the first step on."""
    found: Counter[str] = Counter()
    requests = transient_rows(tables)
    pools = plan_pools(allocation, requests)
    for role, pool in pools.items():
        found[CATEGORY_OF_ROLE[role]] += pool.slots * sum(area.size_bytes for area in pool.areas)
    for role, wanted in requests.items() if allocation.persistent_fallback else ():
        served = pools[role].area_of if role in pools else {}
        if role == "compute_weights" or stepped:
            alone = (one for one in wanted if one.bucket not in served)
            found[CATEGORY_OF_ROLE[role]] += sum(one.size_bytes for one in alone)
    return found
