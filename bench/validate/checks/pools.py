"""What buffer pools hold at rest, from section 1.7 of the specification alone."""

from __future__ import annotations

from collections.abc import Sequence

from bench.engines.dtypes import TORCH_DTYPES
from bench.engines.inspection import BucketContents
from bench.spec import POOLS, AllocatorName, MfsdpSettings
from bench.validate.case_evidence import CaseEvidence
from bench.validate.cases import POLICIES
from bench.validate.checks.collectives import is_root


def pools_bytes(evidence: CaseEvidence) -> int:
    """Bytes of all pools of a case: weights, gradients, and the outer reduction's buckets.

    A pool serves what comes and goes: weights that are gathered for every use, gradients that are
    reduced per microbatch or change dtype for the wire, and outer reductions that change it. One
    outer reduction is under way at a time, so its pool has one slot.
    """
    case = evidence.case
    if case.allocator not in POOLS:
        return 0
    compute, _, _, wire = (TORCH_DTYPES[name].itemsize for name in POLICIES[case.policy])
    changes_dtype = POLICIES[case.policy][2] != POLICIES[case.policy][3]
    buckets = [bucket for bucket in evidence.seen[0].buckets if not is_root(bucket)]
    trainable = [bucket for bucket in buckets if bucket.parameters[0] in evidence.trainable]
    slots, found = MfsdpSettings().pool_slots, 0
    if "weights" in case.sharded:
        found += pool_elements(case.allocator, buckets, slots) * compute
    if evidence.reduces_every_microbatch or changes_dtype:
        found += pool_elements(case.allocator, trainable, slots) * wire
    if case.outer > 1 and changes_dtype:
        parts = 1 if not case.sharded else case.inner
        found += pool_elements(case.allocator, trainable, 1) // parts * wire
    return found


def pool_elements(allocator: AllocatorName, buckets: Sequence[BucketContents], slots: int) -> int:
    """Elements of a pool: `slots` times the largest j-th largest bucket of a unit, over all j.

    A fixed pool serves the units of the most frequent sizes only: of equally frequent ones those
    with the most elements, then those that come first.
    """
    units: dict[str, list[int]] = {}
    for bucket in buckets:
        units.setdefault(bucket.name.rpartition("/")[0], []).append(bucket.elements)
    sizes = [sorted(unit)[::-1] for unit in units.values()]
    if allocator == "fixed_pool" and sizes:
        best = max(sizes, key=lambda unit: (sizes.count(unit), sum(unit)))
        sizes = [unit for unit in sizes if unit == best]
    longest = max((len(unit) for unit in sizes), default=0)
    slot = sum(max(unit[j] for unit in sizes if len(unit) > j) for j in range(longest))
    return min(slots, len(sizes)) * slot
