"""Memory: at rest after a step, from step to step, after deletion; and the order of its uses."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import pairwise

from bench.engines.dtypes import TORCH_DTYPES
from bench.engines.inspection import BucketContents
from bench.spec import POOLS, MfsdpSettings
from bench.validate.case_evidence import CaseEvidence, NotApplicableError, wrong
from bench.validate.cases import EXPERT_PARALLEL, POLICIES
from bench.validate.checks.collectives import EXPERTS_APART, is_root
from bench.validate.scenario import NOISE_BYTES

_STATE_SCALAR_BYTES = 4
_SLOTS = MfsdpSettings().pool_slots


def at_rest(evidence: CaseEvidence) -> str:
    """The engine's ledger after each step against the table of the strategies, to the byte.

    The optimizer has a state of what it was handed a gradient of, in this step or an earlier one.
    """
    if evidence.case.model in EXPERT_PARALLEL:
        raise NotApplicableError(EXPERTS_APART)
    if evidence.case.recipe == "mxfp8":
        raise NotApplicableError("scales of a shard take as many bytes as its rows need")
    if evidence.case.optimizer == "muon":
        raise NotApplicableError("state of whole matrices is with their owners")
    evidence.require("ledger", "buckets")
    buffers = sum(_bucket_bytes(evidence, bucket) for bucket in evidence.seen[0].buckets)
    buffers += pools_bytes(evidence)
    for step, rank, seen_step in evidence.each(evidence.settled_steps):
        held = dict(seen_step.held_bytes or {})
        state = held.pop("optimizer_state", 0)
        taken = [s.gradients for s in evidence.seen[rank].steps[: step + 1] if s.stepped]
        stepped = [n for n in evidence.trainable if any(g.get(n) is not None for g in taken)]
        rows = [seen_step.weights[name].rows for name in stepped]
        wanted_state = sum(2 * row.nbytes + _STATE_SCALAR_BYTES for row in rows)
        for what, measured, expected in (
            ("weights, gradients and communication", sum(held.values()), buffers),
            ("optimizer state", state, wanted_state),
        ):
            if measured != expected:
                raise wrong(
                    step, rank=rank, expected=f"{expected} B of {what}", found=f"{measured} B",
                    evidence=tuple(f"ledger: {k} {v} B" for k, v in held.items()),
                )  # fmt: skip
    return f"{buffers} B per rank besides the optimizer's, to the byte"


def _bucket_bytes(evidence: CaseEvidence, bucket: BucketContents) -> int:
    """Section 1.2 of the specification for one buffer, padding included."""
    case = evidence.case
    compute, main, grads, _ = (TORCH_DTYPES[name].itemsize for name in POLICIES[case.policy])
    elements = bucket.elements
    trainable = bucket.parameters[0] in evidence.trainable
    encoded = evidence.is_encoded(bucket)
    shard = elements // case.inner
    sharded = "weights" in case.sharded
    separate = encoded or case.offload or POLICIES[case.policy][0] != POLICIES[case.policy][1]
    # Cast from the main weights into each gather, unless a shard has to collect outer pieces.
    casts = sharded and (trainable or case.offload) and separate and not case.shards_outside
    weights = 0 if casts else (shard if sharded else elements) * compute
    if encoded:  # a byte of code for each, and what modules compute with unless it comes and goes
        weights = 0 if sharded else elements * compute
        weights += elements if not case.sharded else shard
    if sharded and is_root(bucket) and (case.allocator in POOLS or not trainable):
        # Without a pool a step gives back what it has made stale.
        weights += elements * compute
    owned = elements if not case.sharded else shard
    if case.shards_outside:
        owned //= case.outer
    if not trainable:
        return weights + (owned * compute if encoded or case.offload else 0)
    weights += owned * main if separate else 0
    # `zero_grad` frees gradients, unless no buffer may move.
    if case.allocator not in POOLS or case.offload:
        return weights
    accumulator = shard if evidence.reduces_every_microbatch else elements
    return weights + accumulator * grads


def pools_bytes(evidence: CaseEvidence) -> int:
    """Bytes of all pools of a case: weights, gradients, and the outer reduction's buckets.

    A pool serves what comes and goes: weights that are gathered for every use, gathered codes,
    gradients that are reduced per microbatch or change dtype for the wire, and outer reductions
    that change it. One outer reduction is under way at a time, so its pool has one slot.
    """
    case = evidence.case
    if case.allocator not in POOLS:
        return 0
    compute, _, _, wire = (TORCH_DTYPES[name].itemsize for name in POLICIES[case.policy])
    changes_dtype = POLICIES[case.policy][2] != POLICIES[case.policy][3]
    buckets = [bucket for bucket in evidence.seen[0].buckets if not is_root(bucket)]
    sent = [(bucket, wire) for bucket in buckets if bucket.parameters[0] in evidence.trainable]
    gathered = [(bucket, compute) for bucket in buckets if "weights" in case.sharded]
    gathered += [(bucket, 1) for bucket in buckets if case.sharded and evidence.is_encoded(bucket)]
    pooled = pool_bytes(case.allocator, gathered, _SLOTS)
    if evidence.reduces_every_microbatch or changes_dtype:
        pooled += pool_bytes(case.allocator, sent, _SLOTS)
    if case.outer > 1 and changes_dtype:
        pooled += pool_bytes(case.allocator, sent, 1) // (case.inner if case.sharded else 1)
    return pooled


def pool_bytes(kind: str, buffers: Sequence[tuple[BucketContents, int]], slots: int) -> int:
    """Bytes of a pool: `slots` times the largest j-th largest buffer of a unit, over all j.

    buffers: buckets, and bytes of an element, which have areas of their own. A fixed pool serves
    the units of the most frequent sizes only: of equally frequent ones those with the most bytes.
    """
    units: dict[str, Counter[tuple[int, int]]] = defaultdict(Counter)
    for bucket, item in sorted(buffers, key=lambda buffer: -buffer[0].elements):
        sizes = units[bucket.name.rpartition("/")[0]]
        sizes[item, sum(other == item for other, _ in sizes)] = item * bucket.elements
    served, areas = [*units.values()], Counter[tuple[int, int]]()
    if kind == "fixed_pool" and served:
        best = max(served, key=lambda unit: (served.count(unit), unit.total()))
        served = [unit for unit in served if unit == best]
    for unit in served:
        areas |= unit
    return min(slots, len(served)) * areas.total()


def no_growth(evidence: CaseEvidence) -> str:
    """Tensors that exist at rest do not become more in every step.

    Once they may: 400 B on one of four ranks were seen once (`no_shard`, experts), and never again.
    So a leak in a single step passes here; `freed` sees it if it outlives the engine.
    """
    for rank, watched in enumerate(evidence.seen):
        held = [step.live_bytes for step in watched.steps]
        grown = [later - before for before, later in pairwise(held)]
        if grown and min(grown) > NOISE_BYTES:
            raise wrong(
                1, rank=rank, expected=f"{held[0]} B of tensors, as after step 1",
                found=f"{held[1]} B ({grown[0]:+d}), and more in every step",
                evidence=tuple(
                    f"ledger after step {number}: {after.held_bytes}"
                    for number, after in enumerate(watched.steps, 1)
                ),
            )  # fmt: skip
    return f"{evidence.seen[0].steps[-1].live_bytes} B after the last step"


def freed(evidence: CaseEvidence) -> str:
    """A deleted engine leaves no tensor behind."""
    for rank, watched in enumerate(evidence.seen):
        if watched.left_bytes > NOISE_BYTES:
            # Behind the last step: what was wrong before it is told first.
            raise wrong(
                len(watched.steps) - 1, rank=rank, expected="no tensor of a deleted engine",
                found=f"{watched.left_bytes} B",
            )  # fmt: skip
    return f"at most {max(0, *(s.left_bytes for s in evidence.seen))} B left"
