"""The wire: dtypes as they travelled, the order of collectives on all ranks, and the accounts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import zip_longest

import torch

from bench.engines.dtypes import TORCH_DTYPES
from bench.engines.inspection import WireEntry
from bench.spec import DtypeName
from bench.validate.case_evidence import CaseEvidence, NotApplicableError, wrong
from bench.validate.cases import EXPERT_PARALLEL, POLICIES
from bench.validate.observation import Sent, StepSeen
from bench.validate.wire_tap import ring_bytes

_GATHERS = ("all_gather", "broadcast")
#: torch's operators by what they do; a plain message may be part of either.
_REDUCING = ("allreduce", "reduce_scatter")
_EXCHANGES = ("send", "alltoall_", "alltoall_base_")
#: Dtype of codes and scales on the wire, and of maxima that scales are made from.
CODES = "uint8"
_MAXIMA = "float32"


def payloads(sent: Iterable[Sent]) -> list[Sent]:
    """Without integers and single numbers, which are the engine's bookkeeping and norms."""
    several = (s for s in sent if s.elements > 1 or s.operation == "send")
    return [s for s in several if not s.dtype.startswith(("int", "bool"))]


def may_reduce(operation: str) -> bool:
    """Whether an operator of torch may carry gradients."""
    return operation in _EXCHANGES or any(word in operation for word in _REDUCING)


def dtypes(evidence: CaseEvidence) -> str | None:
    """Weights travel in the compute dtype, gradients in the dtype of the policy.

    Under autocast there are only main weights.
    """
    if len(evidence.seen) == 1:
        return None
    of_policy = POLICIES[evidence.case.policy]
    compute = _torch_name(of_policy[1 if evidence.seen[0].autocast else 0])
    coded = {b.name for watched in evidence.seen for b in watched.buckets if evidence.is_encoded(b)}
    used: set[str] = set()
    for step, rank, seen_step in evidence.each():
        wire = _torch_name(evidence.wire_dtype(step))
        weights, sums = compute, wire
        if evidence.case.recipe != "none":
            weights, sums = f"{compute} or {CODES}", f"{wire} or {_MAXIMA}"
        exchanged = f"{weights} or {sums}"
        if evidence.case.optimizer == "muon":  # whole matrices: main weights and main gradients
            exchanged += "".join(f" or {_torch_name(dtype)}" for dtype in of_policy[1:3])
        wanted = _by_operator(payloads(seen_step.sent), weights, sums, exchanged)
        for entry in seen_step.log:
            expected = compute if entry.operation in _GATHERS else wire
            expected = exchanged if entry.operation == "all_to_all" else expected
            if entry.bucket in coded and entry.operation == "all_gather":
                expected = CODES
            elif entry.bucket in coded and entry.operation == "all_reduce":
                expected = f"{wire} or {_MAXIMA}"
            wanted.append((entry.operation, entry.dtype, expected))
        for operation, dtype, expected in wanted:
            used.add(f"{operation} {dtype}")
            if dtype not in expected.split(" or "):
                raise wrong(
                    step,
                    rank=rank,
                    expected=f"{operation} in {expected}",
                    found=f"{operation} in {dtype}",
                    evidence=evidence.wire_lines(step, None, rank),
                )
    return ", ".join(sorted(used)) or "nothing was sent"


def gather_precision(evidence: CaseEvidence) -> str | None:
    """A case that requested low-precision gathers has got some, by what was seen on the wire."""
    case = evidence.case
    if case.recipe == "none" or not case.sharded or case.inner == 1:
        return None
    for rank, watched in enumerate(evidence.seen):
        sent = payloads(message for step in watched.steps for message in step.sent)
        if not any(message.dtype == CODES for message in sent):
            dtypes = ", ".join(sorted({m.dtype for m in sent})) or "nothing"
            raise wrong(
                0, rank=rank, expected=f"weights of {case.recipe} gathered in {CODES}",
                found=f"low-precision gathers were requested and not made: {dtypes} on the wire",
            )  # fmt: skip
    return f"{CODES} on the wire"


def _by_operator(
    sent: Sequence[Sent], compute: str, wire: str, exchanged: str
) -> list[tuple[str, str, str]]:
    texts = []
    for message in sent:
        expected = wire if may_reduce(message.operation) else compute
        if message.operation in _EXCHANGES:
            expected = exchanged
        texts.append((message.operation, message.dtype, expected))
    return texts


def _torch_name(dtype: DtypeName) -> str:
    return str(TORCH_DTYPES[dtype]).removeprefix("torch.")


def order(evidence: CaseEvidence) -> str | None:
    """All ranks issue the same collectives in the same order."""
    if len(evidence.seen) == 1:
        return None
    count = 0
    for step, rank, other in evidence.each():
        if rank == 0:
            continue
        first = evidence.seen[0].steps[step]
        sent = [_in_order(message.sent) for message in (first, other)]
        logs = [_in_order(watched.log) for watched in (first, other)]
        for ours, theirs in (logs, sent):
            count += len(ours)
            for index, (own, same) in enumerate(zip_longest(ours, theirs, fillvalue="nothing")):
                if own != same:
                    raise wrong(
                        step,
                        rank=rank,
                        expected=f"as rank 0, number {index + 1}: {own}",
                        found=str(same),
                        evidence=(
                            *evidence.wire_lines(step, None),
                            *evidence.wire_lines(step, None, rank),
                        ),
                    )
    return f"{count} entries alike on {len(evidence.seen)} ranks"


def _in_order(sent: Sequence[Sent | WireEntry]) -> list[object]:
    """What is the same on all ranks: not the size of what holds a rank's own rows."""
    own = ("send", "all_to_all", "alltoall_base_")
    return [
        (s.operation, s.dtype, getattr(s, "ranks", 0)) if s.operation in own else s for s in sent
    ]


def accounts(evidence: CaseEvidence) -> str | None:
    """Bytes: the engine's meter and its log against what was seen on the wire, dtype by dtype."""
    if len(evidence.seen) == 1:
        return None
    if all(s.accounted_bytes is None for s in evidence.seen[0].steps):
        raise NotApplicableError("the engine counts no bytes")
    total = 0
    for step, rank, seen_step in evidence.each():
        sent: Counter[str] = Counter()
        for message in payloads(seen_step.sent):
            sent[message.dtype] += ring_bytes(message)
        total += sent.total()
        logged, single = _logged_bytes(seen_step)
        metered = None if seen_step.accounted_bytes is None else seen_step.accounted_bytes - single
        pairs = [("the engine's meter", metered, sent.total())]
        pairs += [(f"the engine's log, {d}", logged[d], sent[d]) for d in logged | sent]
        for what, said, counted in pairs if seen_step.log else pairs[:1]:
            if said is not None and said != counted:
                raise wrong(
                    step,
                    rank=rank,
                    expected=f"{what}: {counted} B, as seen on the wire",
                    found=f"{said} B",
                    evidence=evidence.wire_lines(step, None, rank),
                )
    return f"{total} B in all steps and ranks, as metered"


def _logged_bytes(seen_step: StepSeen) -> tuple[Counter[str], int]:
    """Bytes that the engine's log says were sent, by dtype; and those of single maxima.

    `payloads` leaves out single numbers: the maximum of a lone matrix, a shard of one element.
    """
    logged: Counter[str] = Counter()
    single = 0
    for e in seen_step.log:
        passes = 2 if e.operation == "all_reduce" else 1
        size = passes * e.payload_bytes * (e.group_size - 1) // e.group_size
        if e.operation == "all_reduce" and e.payload_bytes == getattr(torch, e.dtype).itemsize:
            single += size
        else:
            logged[e.dtype] += size
    return logged, single


def groups(evidence: CaseEvidence) -> str | None:
    """Gathers on a process group of their own, where that was requested."""
    case = evidence.case
    if not case.gather_group or case.inner == 1 or not case.sharded:
        return None
    if case.model in EXPERT_PARALLEL:
        raise NotApplicableError("experts have process groups of their own")
    expected = 2 + (case.outer > 1)
    for rank, watched in enumerate(evidence.seen):
        messages = [s for step in watched.steps[1:] for s in payloads(step.sent)]
        used = {s.group for s in messages}
        if len(used) != expected:
            raise wrong(
                1, rank=rank, expected=f"{expected} process groups in use",
                found=f"{len(used)}", evidence=evidence.wire_lines(1, None, rank),
            )  # fmt: skip
    return f"{expected} process groups in use"
