"""How often each buffer is communicated and how large it is: the table of the strategies.

Per bucket and step of k microbatches, inner axis: no_shard 1 all-reduce; optim 1 reduce-scatter and
1 all-gather of updated weights; optim_grads k and 1; optim_grads_params k and 2k (the root's: 1).
Outer axis, once per step: an all-reduce, or a reduce-scatter and an all-gather. Weights that no
step has updated need no refresh, so the first step, and frozen buckets, go without.

Quantised weights: a gather per payload (MXFP8 has codes and scales for a forward pass, codes for a
backward pass, and gathers for every pass); the first step gathers as others do. Each update
encodes, which takes the maximum over the ranks of every axis that shards the optimizer.
"""

from __future__ import annotations

from collections import Counter
from math import prod

from bench.engines.inspection import BucketContents
from bench.validate.case_evidence import CaseEvidence, NotApplicableError, wrong
from bench.validate.cases import EXPERT_PARALLEL

#: Padding of a buffer above what its largest parameter alone would need, asked of any engine.
PADDING_BUDGET = 0.05

EXPERTS_APART = "experts are sharded over a mesh of their own, which the table does not describe"

#: Payloads of a forward and of a backward pass, where there is not one for both.
_PAYLOADS = {"mxfp8": (2, 1)}

Counts = Counter[tuple[str, str]]


def counts(evidence: CaseEvidence) -> str | None:
    """Collectives of every bucket and step, by operation and axis."""
    case = evidence.case
    if case.model in EXPERT_PARALLEL:
        raise NotApplicableError(EXPERTS_APART)
    evidence.require("log", "buckets")
    if case.model == "recomputed" and case.recipe in _PAYLOADS:
        raise NotApplicableError("what is recomputed is gathered again, for both passes")
    if case.model == "twice":
        raise NotApplicableError("a unit that runs twice may be gathered two to four times")
    entries = 0
    for step, rank, seen_step in evidence.each(evidence.settled_steps):
        buckets = evidence.seen[rank].buckets
        counts: dict[str, Counts] = {bucket.name: Counter() for bucket in buckets}
        for entry in seen_step.log:
            counts.setdefault(entry.bucket, Counter())[entry.operation, entry.group] += 1
            entries += 1
        for bucket in buckets:
            expected = expected_counts(evidence, bucket, step)
            if not _agree(counts[bucket.name], expected, step):
                raise wrong(
                    step,
                    parameter=bucket.parameters[0],
                    rank=rank,
                    expected=f"bucket {bucket.name}: {_words(expected)}",
                    found=_words(counts[bucket.name]),
                    evidence=evidence.wire_lines(step, bucket.parameters[0], rank),
                )
    return f"{entries} collectives, all expected"


def _agree(counts: Counts, expected: Counts, step: int) -> bool:
    """Equal; in the first step one refresh more is right, where weights had to be loaded first."""
    loaded = Counter({("all_gather", axis): 1 for axis in ("inner", "outer")})
    return counts == expected or (
        step == 0 and not (counts - expected - loaded or expected - counts)
    )


def expected_counts(evidence: CaseEvidence, bucket: BucketContents, step: int) -> Counts:
    """From the module's table; an axis of one rank communicates nothing."""
    case, k = evidence.case, evidence.case.microbatches
    trainable = bucket.parameters[0] in evidence.trainable
    encoded = evidence.is_encoded(bucket)
    updated = any(earlier < step for earlier in evidence.updated_steps)
    refreshed = (trainable and updated) or (encoded and step == 0)
    ahead, back = _PAYLOADS.get(case.recipe, (1, 1)) if encoded else (1, 1)
    counts: Counts = Counter()
    if case.inner > 1:
        gathers_every_use = "weights" in case.sharded and not is_root(bucket)
        if gathers_every_use or (case.sharded and (ahead, back) != (1, 1)):
            counts["all_gather", "inner"] = (ahead + back) * k
        elif case.sharded and refreshed:
            counts["all_gather", "inner"] = 1
        if trainable and not case.sharded:
            counts["all_reduce", "inner"] = 1
        elif trainable:
            every = evidence.reduces_every_microbatch
            counts["reduce_scatter", "inner"] = k if every else 1
        if encoded and trainable and case.sharded:
            counts["all_reduce", "inner"] += 1
    if case.outer > 1 and trainable:
        shards = case.shards_outside
        counts["reduce_scatter" if shards else "all_reduce", "outer"] = 1
        if shards and refreshed:
            counts["all_gather", "outer"] = 1 if (ahead, back) == (1, 1) else ahead + back
        if shards and encoded:
            counts["all_reduce", "outer"] += 1
    return counts


def is_root(bucket: BucketContents) -> bool:
    """Whether its parameters are the root's, by the toy models' names: blocks are units."""
    return not all(name.startswith("blocks.") for name in bucket.parameters) or (
        bucket.name.startswith("(root)")
    )


def _words(counts: Counts) -> str:
    parts = [f"{n} x {operation} ({axis})" for (operation, axis), n in sorted(counts.items()) if n]
    return ", ".join(parts) or "no collective"


def volume(evidence: CaseEvidence) -> str:
    """Every parameter lies in one buffer, which is no larger than the padding rule allows."""
    if evidence.case.model in EXPERT_PARALLEL:
        raise NotApplicableError(EXPERTS_APART)
    evidence.require("buckets")
    held = Counter(name for bucket in evidence.seen[0].buckets for name in bucket.parameters)
    for name in evidence.reference.shapes:
        if held[name] != 1:
            raise wrong(
                parameter=name, expected="one buffer that holds it", found=f"{held[name]} buffers"
            )
    worst = 0.0
    for bucket in evidence.seen[0].buckets:
        used, allowed = _allowed_elements(evidence, bucket)
        padding = bucket.elements / used - 1
        worst = max(worst, padding)
        if bucket.elements > allowed:
            raise wrong(
                parameter=bucket.parameters[0],
                expected=f"bucket {bucket.name}: at most {allowed:.0f} elements for {used} used",
                found=f"{bucket.elements} elements ({100 * padding:+.0f} % padding)",
                evidence=tuple(
                    f"{name} {evidence.reference.shapes[name]}" for name in bucket.parameters
                ),
            )
        _check_payloads(evidence, bucket)
    return f"largest padding {100 * worst:.0f} %"


def _allowed_elements(evidence: CaseEvidence, bucket: BucketContents) -> tuple[int, float]:
    case = evidence.case
    slices = case.inner * (case.outer if case.shards_outside else 1)
    shapes = [evidence.reference.shapes[name] for name in bucket.parameters]
    used = evidence.used_elements(bucket)
    largest = max(shapes, key=prod)
    rows = largest[0] if largest else 1
    alone = -(-rows // slices) * slices / rows - 1
    if not case.sharded:
        alone = max(alone, 0.0)
    return used, used * (1 + alone + PADDING_BUDGET)


def _check_payloads(evidence: CaseEvidence, bucket: BucketContents) -> None:
    """Inner collectives move the whole buffer, outer ones all of it or an inner slice."""
    sizes = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "uint8": 1}
    for step, rank, seen_step in evidence.each():
        for entry in seen_step.log:
            if entry.bucket != bucket.name or entry.dtype not in sizes:
                continue
            elements = entry.payload_bytes / sizes[entry.dtype]
            is_full = entry.group == "outer" and not evidence.case.sharded
            parts = 1 if entry.group == "inner" or is_full else evidence.case.inner
            # Scales, and maxima, are fewer than what they belong to.
            small = entry.operation == "all_reduce" or entry.dtype == "uint8"
            if evidence.is_encoded(bucket) and small and elements * parts < bucket.elements:
                continue
            if elements * parts != bucket.elements:
                raise wrong(
                    step,
                    parameter=bucket.parameters[0],
                    rank=rank,
                    expected=f"{bucket.elements // parts} elements of {bucket.name}",
                    found=f"{entry.operation} of {elements:.0f} elements",
                )
