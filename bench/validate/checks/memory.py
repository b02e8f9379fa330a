"""What is held at rest after a step, what grows from step to step, what a deleted engine leaves."""

from __future__ import annotations

from itertools import pairwise

from bench.engines.dtypes import TORCH_DTYPES
from bench.engines.inspection import BucketContents
from bench.spec import POOLS
from bench.validate.case_evidence import CaseEvidence, at
from bench.validate.cases import EXPERT_PARALLEL, POLICIES
from bench.validate.checks.check_verdict import failed, not_applicable, passed
from bench.validate.checks.collectives import EXPERTS_APART, is_root
from bench.validate.checks.pools import pools_bytes
from bench.validate.scenario import NOISE_BYTES
from bench.verdict import CheckVerdict

_STATE_SCALAR_BYTES = 4
_FSDP1_KEEPS = (
    "FullyShardedDataParallel keeps whole weights in a cycle of references through C++, which"
    " Python's collector cannot see"
)


def at_rest(evidence: CaseEvidence) -> CheckVerdict | None:
    """The engine's ledger after each step against the table of the strategies, to the byte.

    The optimizer has a state of what it was handed a gradient of, in this step or an earlier one.
    """
    check = "memory at rest"
    reason = _why_not(evidence)
    if reason is not None:
        return not_applicable(check, reason)
    buffers = sum(_bucket_bytes(evidence, bucket) for bucket in evidence.seen[0].buckets)
    buffers += pools_bytes(evidence)
    for step in evidence.settled_steps:
        for rank, one in enumerate(evidence.seen):
            held = dict(one.steps[step].held_bytes or {})
            state = held.pop("optimizer_state", 0)
            taken = [s.gradients for s in one.steps[: step + 1] if s.stepped]
            stepped = [n for n in evidence.trainable if any(g.get(n) is not None for g in taken)]
            rows = [one.steps[step].weights[name].rows for name in stepped]
            wanted_state = sum(2 * row.nbytes + _STATE_SCALAR_BYTES for row in rows)
            for what, found, expected in (
                ("weights, gradients and communication", sum(held.values()), buffers),
                ("optimizer state", state, wanted_state),
            ):
                if found != expected:
                    finding = at(
                        step, rank=rank, expected=f"{expected} B of {what}", found=f"{found} B",
                        evidence=tuple(f"ledger: {k} {v} B" for k, v in held.items()),
                    )  # fmt: skip
                    return failed(check, finding)
    return passed(check, f"{buffers} B per rank beside the optimizer's, to the byte")


def _why_not(evidence: CaseEvidence) -> str | None:
    """Why the table says nothing about a case."""
    if evidence.case.model in EXPERT_PARALLEL:
        return EXPERTS_APART
    if evidence.case.recipe == "mxfp8":
        return "scales of a shard take as many bytes as its rows need"
    lacking = evidence.seen[0].lacking
    return lacking.get("ledger") or lacking.get("buckets")


def _bucket_bytes(evidence: CaseEvidence, bucket: BucketContents) -> int:
    """Section 1.2 of the specification for one buffer, padding included."""
    case = evidence.case
    compute, main, grads, _ = (TORCH_DTYPES[name].itemsize for name in POLICIES[case.policy])
    elements = bucket.elements
    trainable = bucket.parameters[0] in evidence.trainable
    encoded = evidence.is_encoded(bucket)
    shard = elements // case.inner
    sharded = "weights" in case.sharded
    separate = encoded or POLICIES[case.policy][0] != POLICIES[case.policy][1]
    # Cast from the main weights into each gather, unless a shard has to collect outer pieces.
    casts = sharded and trainable and separate and not case.shards_outside
    weights = 0 if casts else (shard if sharded else elements) * compute
    if encoded:  # a byte of code for each, and what modules compute with unless it comes and goes
        weights = 0 if sharded else elements * compute
        weights += elements if not case.sharded else shard
    if sharded and is_root(bucket):
        weights += elements * compute
    owned = elements if not case.sharded else shard
    if case.shards_outside:
        owned //= case.outer
    if not trainable:
        return weights + (owned * compute if encoded else 0)
    weights += owned * main if separate else 0
    if case.allocator not in POOLS:  # `zero_grad` frees gradients, unless no buffer may move
        return weights
    accumulator = shard if evidence.reduces_every_microbatch else elements
    return weights + accumulator * grads


def no_growth(evidence: CaseEvidence) -> CheckVerdict | None:
    """Tensors that exist at rest do not become more in every step.

    Once they may: a busy machine has once shown 400 B more on one of four ranks after the second
    step (`no_shard`, experts). It did not come back, and what held them is not known. So a leak
    that happens in a single step passes here; `freed` sees it if it outlives the engine.
    """
    check = "no growth"
    for rank, one in enumerate(evidence.seen):
        held = [step.live_bytes for step in one.steps]
        grown = [later - before for before, later in pairwise(held)]
        if grown and min(grown) > NOISE_BYTES:
            finding = at(
                1, rank=rank, expected=f"{held[0]} B of tensors, as after step 1",
                found=f"{held[1]} B ({grown[0]:+d}), and more in every step",
                evidence=tuple(
                    f"ledger after step {number}: {after.held_bytes}"
                    for number, after in enumerate(one.steps, 1)
                ),
            )  # fmt: skip
            return failed(check, finding)
    return passed(check, f"{evidence.seen[0].steps[-1].live_bytes} B after the last step")


def freed(evidence: CaseEvidence) -> CheckVerdict | None:
    """A deleted engine leaves no tensor behind."""
    check = "freed after deletion"
    whole = not evidence.case.sharded or evidence.case.inner == 1
    if evidence.case.engine == "fsdp1" and whole:
        return not_applicable(check, _FSDP1_KEEPS)
    for rank, one in enumerate(evidence.seen):
        if one.left_bytes > NOISE_BYTES:
            # Behind the last step: what was wrong before it is told first.
            finding = at(
                len(one.steps) - 1, rank=rank, expected="no tensor of a deleted engine",
                found=f"{one.left_bytes} B",
            )  # fmt: skip
            return failed(check, finding)
    return passed(check, f"at most {max(0, *(s.left_bytes for s in evidence.seen))} B left")
