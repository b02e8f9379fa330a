"""Which buffers of a bucket come and go with its unit, and the pools that serve them. Pure.

S elements with padding, N inner ranks:

role             elements  dtype      where
compute_weights  S         compute    parameter FLAT, not of the root, whose weights stay
grad_bucket      S         grad_comm  trainable, and gradients are reduced per microbatch or change
                                      dtype on their way to the wire
outer_bucket     S, S/N    grad_comm  trainable, an outer axis, and a change of dtype; S/N where the
                                      inner axis shards the optimizer

The root's buckets are asked for once per pass: no slot is planned for them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, Literal, get_args

from mfsdp_core.plan.allocation import AllocationConfig
from mfsdp_core.plan.coordinate import Coordinate
from mfsdp_core.plan.dtype_policy import GroupDtypes, Name
from mfsdp_core.plan.grouping import ROOT, BucketPlan
from mfsdp_core.plan.pools import BucketRequest, PoolPlan, plan_pool
from mfsdp_core.plan.strategy import Strategy

PooledRole = Literal["compute_weights", "grad_bucket", "outer_bucket"]
POOLED_ROLES: tuple[PooledRole, ...] = get_args(PooledRole)

#: Slots that a pool needs at most: one outer reduction is waited for before the next is started.
MOST_SLOTS: Mapping[PooledRole, int] = {"outer_bucket": 1}


@dataclass(frozen=True)
class TransientBuffer(Generic[Name]):
    """padding_elements: the part of `elements` that belongs to no parameter."""

    role: PooledRole
    dtype: Name
    elements: int
    padding_elements: int


def transient_buffers(
    plan: BucketPlan, strategy: Strategy, coordinate: Coordinate, dtypes: GroupDtypes[Name]
) -> Iterator[TransientBuffer[Name]]:
    """By the table of the module."""
    inner = strategy.inner
    whole = plan.layout.total_elements
    padding = whole - plan.layout.used_elements
    if inner.gathers_every_use and plan.unit != ROOT:
        yield TransientBuffer("compute_weights", dtypes.compute, whole, padding)
    if not plan.requires_grad:
        return
    if inner.reduces_every_microbatch or dtypes.needs_comm_buffer:
        yield TransientBuffer("grad_bucket", dtypes.grad_comm, whole, padding)
    if coordinate.has_outer_axis and dtypes.needs_comm_buffer:
        accumulated = whole // (coordinate.inner_size if inner.shards_optimizer else 1)
        yield TransientBuffer("outer_bucket", dtypes.grad_comm, accumulated, 0)


def plan_pools(
    config: AllocationConfig, requests: Mapping[PooledRole, Sequence[BucketRequest]]
) -> dict[PooledRole, PoolPlan]:
    """The pool of every role that has one: none where the allocator is no pool."""
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
