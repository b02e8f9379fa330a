"""Requirements as a gate: which operations must have run on which kind of kernel."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from bench.errors import UsageError
from reports.nccl.audit import Audit
from reports.nccl.rows import Verdict, VerdictRow

_OPERATIONS: Final = {
    "AG": "AllGather",
    "RS": "ReduceScatter",
    "AR": "AllReduce",
    "BC": "Broadcast",
    "A2A": "AlltoAll",
}
_KINDS: Final = {
    "sym": Verdict.SYMMETRIC,
    "symmetric": Verdict.SYMMETRIC,
    "ce": Verdict.COPY_ENGINE,
    "copy_engine": Verdict.COPY_ENGINE,
    "hce": Verdict.HIERARCHICAL_CE,
    "regular": Verdict.REGULAR,
}
# The reviewer's checklist for a change of the communication buffers, topology by topology.
PROFILES: Final = {
    "fsdp": "AG=sym,RS=sym",
    "hsdp-one-domain": "AG=sym,RS=sym,AR=sym",
    "hsdp-multi-domain": "AG=sym,RS=sym",
    "hsdp-tp": "AG=sym,RS=sym",
}
_TERM: Final = re.compile(r"(?:([A-Za-z][\w-]*)\.)?([A-Za-z0-9]+)=([A-Za-z_|]+)")

State = Literal["met", "not met", "no evidence"]


@dataclass(frozen=True)
class Requirement:
    """operation: full name. kinds: verdicts that satisfy it. role: of the communicator, "" any."""

    text: str
    operation: str
    kinds: frozenset[Verdict]
    role: str = ""


@dataclass(frozen=True)
class Result:
    """One requirement judged. failing: rows that contradict it, or that show nothing."""

    requirement: Requirement
    state: State
    message: str
    failing: tuple[VerdictRow, ...] = ()


def parse_requirements(text: str) -> tuple[Requirement, ...]:
    """`AG=sym,RS=sym|ce,inner.AR=sym` as requirements.

    Raises:
        UsageError: a term that means nothing.
    """
    terms = [part.strip() for part in text.split(",")]
    found = [_parse_term(term) for term in terms if term]
    if not found:
        raise UsageError("--require is empty; expected terms such as AG=sym,RS=sym")
    return tuple(found)


def _parse_term(term: str) -> Requirement:
    match = _TERM.fullmatch(term)
    if match is None:
        raise UsageError(
            f"--require: {term[:60]!r} is no requirement; expected OPERATION=KIND such as AG=sym,"
            " AG=sym|ce or inner.AR=sym"
        )
    role, short, kinds = match.group(1) or "", match.group(2), match.group(3)
    by_name = {
        name.lower(): name for name in (*_OPERATIONS.values(), "Reduce", "Gather", "Scatter")
    }
    operation = _OPERATIONS.get(short.upper()) or by_name.get(short.lower())
    if operation is None:
        raise UsageError(
            f"--require: unknown operation {short!r}; expected one of {', '.join(_OPERATIONS)} or a"
            " full name such as AllGather"
        )
    unknown = [kind for kind in kinds.lower().split("|") if kind not in _KINDS]
    if unknown:
        raise UsageError(
            f"--require: unknown kind {unknown[0]!r} in {term!r}; expected one of"
            f" {', '.join(_KINDS)}, several joined by |"
        )
    wanted = frozenset(_KINDS[kind] for kind in kinds.lower().split("|"))
    return Requirement(term, operation, wanted, role)


def profile(name: str) -> tuple[Requirement, ...]:
    """The requirements of a named topology.

    Raises:
        UsageError: an unknown name.
    """
    if name not in PROFILES:
        raise UsageError(
            f"--profile: unknown profile {name!r}; expected one of {', '.join(PROFILES)}"
        )
    return parse_requirements(PROFILES[name])


def judge(
    audit: Audit,
    requirements: Iterable[Requirement],
    after_iteration: int | None = None,
    min_bytes: int = 0,
) -> list[Result]:
    """One result per requirement; a requirement without evidence is not met.

    Args:
        audit: of the logs.
        requirements: what must have run on which kind of kernel.
        after_iteration: only calls after so many iterations count.
        min_bytes: only calls of so many bytes count.
    """
    counted, remark, refusal = _counted_rows(audit, after_iteration)
    counted = [row for row in counted if row.size_bytes >= min_bytes]
    until = audit.job.unread.damaged_until
    # Without boundaries between iterations, damage may be of any.
    least = after_iteration or 0 if audit.boundaries_by else 0
    damaged = {operation for operation, iteration in until.items() if iteration >= least}
    return [_judge_one(one, counted, remark, refusal, damaged) for one in requirements]


def _counted_rows(audit: Audit, after: int | None) -> tuple[Sequence[VerdictRow], str, str]:
    """Rows that count, how they were chosen, and why none can be chosen."""
    if after is None:
        return audit.rows, "", ""
    if audit.boundaries_by:
        seen = audit.job.iterations_seen or 0
        if seen < after:
            return (), "", f"the log holds the end of {seen} iterations, not of {after}"
        return audit.rows_after(after), f"after iteration {after} ({audit.boundaries_by})", ""
    if any(row.phase for row in audit.rows):  # the log shows a registration
        # Manual registration follows the first iteration, so what comes after it is later still.
        kept = [row for row in audit.rows if row.phase == "after"]
        if after == 1:
            return kept, "after registration (the log marks no iterations)", ""
    return (
        (),
        "",
        f"nothing in the log shows where iteration {after} ends: record it with measure.nccl="
        "evidence, keep the trainer's iteration lines in the same file, or add REG lines, which"
        " show the registration",
    )


def _judge_one(
    one: Requirement,
    counted: Sequence[VerdictRow],
    remark: str,
    refusal: str,
    damaged: Collection[str],
) -> Result:
    where = f" {remark}" if remark else ""
    own = [
        row
        for row in counted
        if row.operation == one.operation
        and (not one.role or one.role in row.communicator.role.split("/"))
    ]
    if refusal or not own:
        what = f"{one.role} {one.operation}".strip()
        return Result(one, "no evidence", refusal or f"the log shows no {what}{where}")
    allowed = {*one.kinds, Verdict.NO_EVIDENCE}
    wrong = [row for row in own if row.foreign_kernels or not set(row.calls) <= allowed]
    if wrong:
        return Result(one, "not met", _wrong(wrong, len(own)) + where, tuple(wrong))
    silent = [row for row in own if Verdict.NO_EVIDENCE in row.calls]
    if silent:
        message = (
            f"{len(silent)} of {len(own)} rows show calls without their kernel{where}:"
            f" {_silence(silent[0])}"
        )
        return Result(one, "no evidence", message, tuple(silent))
    if one.operation in damaged:
        return Result(
            one,
            "no evidence",
            f"damaged lines may be about {one.operation} too: the first stand under Reading",
        )
    return Result(one, "met", f"all {len(own)} rows{where}")


def _silence(row: VerdictRow) -> str:
    """Why it is not known which kernel ran."""
    if row.verdict is Verdict.NO_EVIDENCE:
        return row.reason.text if row.reason else ""
    return (
        f"{row.calls[Verdict.NO_EVIDENCE]} of {sum(row.calls.values())} calls of"
        f" {row.operation} with {row.size_bytes:,} bytes have no line"
    )


def _wrong(wrong: Sequence[VerdictRow], count: int) -> str:
    first = wrong[0]
    reason = "" if first.reason is None else f": {first.reason.text}"
    if first.foreign_kernels:
        reason = f" by {first.foreign_kernels[0]}, a kernel of another operation"
    where = first.communicator.role or first.communicator.label
    return (
        f"{len(wrong)} of {count} rows differ, first {first.operation} of {first.size_bytes:,}"
        f" bytes on communicator {where} is {first.verdict}{reason}"
    )
