"""What a cycle must put on the wire, per bucket, from the table of section 1.2 of fsdp.md.

Written out by strategy name on purpose: nothing of the core's own strategy table is used, only the
number of elements that its layouts give a bucket (whose padding has tests of its own).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from mfsdp_core.plan.grouping import BucketPlan, ParameterFacts, plan_buckets
from oracle.facts import name_of

#: (operation, axis, dtype on the wire, bytes of the full buffer, bucket) -> how often.
Traffic = Counter[tuple[str, str, str, int, str]]


@dataclass(frozen=True)
class Case:
    """What decides the traffic. outer None: there is no outer axis."""

    inner: str
    outer: str | None
    inner_size: int
    outer_size: int
    microbatches: int
    compute: torch.dtype
    comm: torch.dtype


def expected_traffic(
    parameters: Sequence[ParameterFacts], case: Case, gathers_of: Callable[[str], int]
) -> Traffic:
    """All collectives of one cycle (microbatches, step, `zero_grad`) in the steady state.

    gathers_of: how often a unit is gathered in one microbatch where it is freed after every use.
    """
    slices = case.inner_size * (case.outer_size if case.outer == "optim" else 1)
    found: Traffic = Counter()
    for plan in plan_buckets(parameters, slices):
        for axis, operation, dtype, elements, count in _of_bucket(plan, case, gathers_of):
            size = case.inner_size if axis == "inner" else case.outer_size
            if size > 1 and count:
                bytes_ = elements * dtype.itemsize
                found[operation, axis, name_of(dtype), bytes_, plan.name] = count
    return found


def _of_bucket(
    plan: BucketPlan, case: Case, gathers_of: Callable[[str], int]
) -> Iterator[tuple[str, str, torch.dtype, int, int]]:
    """(axis, operation, dtype, elements, count); groups of one are sorted out by the caller."""
    whole, k = plan.layout.total_elements, case.microbatches
    if plan.requires_grad:
        reduction = "all_reduce" if case.inner == "no_shard" else "reduce_scatter"
        often = 1 if case.inner in {"no_shard", "optim"} else k
        yield "inner", reduction, case.comm, whole, often
    yield "inner", "all_gather", case.compute, whole, _gathers(plan, case, gathers_of)
    if plan.requires_grad:
        part = whole if case.inner == "no_shard" else whole // case.inner_size
        if case.outer == "optim":
            yield "outer", "reduce_scatter", case.comm, part, 1
            yield "outer", "all_gather", case.compute, part, 1
        elif case.outer == "no_shard":
            yield "outer", "all_reduce", case.comm, part, 1


def _gathers(plan: BucketPlan, case: Case, gathers_of: Callable[[str], int]) -> int:
    if case.inner == "no_shard":
        return 0
    if case.inner == "optim_grads_params" and plan.unit:
        # Freed after every use, whether it trains or not.
        return case.microbatches * gathers_of(plan.unit)
    # Kept: refreshed in the first forward pass after the step that changed it, which no step does
    # to a frozen one.
    return 1 if plan.requires_grad else 0
