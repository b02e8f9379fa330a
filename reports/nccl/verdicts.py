"""Verdicts: one row per communicator, operation, message size and phase; what requires them.

A requirement says which operations must have run on which kind of kernel.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import Final, Literal

from bench.errors import UsageError
from reports.nccl.calls import CallEvidence, CallKey, Calls, View, calls_of
from reports.nccl.events import COLLECTIVES, LINES, Kind
from reports.nccl.job import LoggedJob, is_unknown
from reports.nccl.reasons import Reason, why_not_symmetric


class Verdict(StrEnum):
    """What the log proves. NO_EVIDENCE is not a kind of REGULAR."""

    SYMMETRIC = "SYMMETRIC"
    REGULAR = "REGULAR"
    COPY_ENGINE = "COPY_ENGINE"
    HIERARCHICAL_CE = "HIERARCHICAL_CE"
    MIXED = "MIXED"
    NO_EVIDENCE = "NO_EVIDENCE"


_PHASES = ("before", "after", "")
# Calls of several kinds are explained by the first of these.
_EXPLAINED: tuple[Kind | None, ...] = ("regular", "hierarchical_ce", "copy_engine", None)


@dataclass(frozen=True)
class CommunicatorRow:
    """A communicator as a reader should see it. ranks, nodes: None if no line says.

    hosts: those whose ranks of it printed something, in alphabetical order.
    """

    label: str
    role: str = ""
    ranks: int | None = None
    nodes: int | None = None
    hosts: tuple[str, ...] = ()
    attributed: bool = True


@dataclass(frozen=True)
class VerdictRow:
    """One verdict.

    calls: by verdict, each at least once, counted over the job; with NO_EVIDENCE, calls of rank 0
    that no line tells the kernel of. at_least: the number of calls is a lower bound, because every
    rank prints the line and the communicator is not known. processes: those that printed it.
    bytes_by_verdict: calls x bytes. channels: of a launch, each number once.
    """

    communicator: CommunicatorRow
    operation: str
    size_bytes: int
    bytes_are: str
    phase: str
    verdict: Verdict
    calls: Mapping[Verdict, int]
    bytes_by_verdict: Mapping[Verdict, int]
    at_least: bool
    lines: int
    kernels: tuple[str, ...]
    channels: tuple[int, ...]
    processes: tuple[str, ...]
    quote: str
    reason: Reason | None
    remarks: tuple[str, ...] = ()

    @property
    def foreign_kernels(self) -> tuple[str, ...]:
        """Kernels that carry the name of another operation: what says so contradicts itself."""
        named = ((kernel, kernel.partition("_")[0]) for kernel in self.kernels)
        return tuple(k for k, name in named if name in COLLECTIVES and name != self.operation)


def rows(made: Calls, role_of: Callable[[Sequence[View]], str]) -> list[VerdictRow]:
    """All rows; `role_of` says what a communicator is for."""
    merged: dict[tuple[object, ...], list[CallEvidence]] = {}
    for key, kinds in made.by_key.items():
        evidence = [kinds[kind] for kind in sorted(kinds, key=str)]
        merged.setdefault(_merge_key(key, evidence), []).extend(evidence)
    described = {key: _communicator(views, role_of(views)) for key, views in made.views.items()}
    unknown = CommunicatorRow("unknown", attributed=False)
    return sorted(
        (_row(own, described.get(own[0].key.group, unknown)) for own in merged.values()), key=_order
    )


def _communicator(views: Sequence[View], role: str) -> CommunicatorRow:
    """By its identifiers."""
    first = min(views, key=lambda view: (view.process, view.pointer))
    key = first.key
    if key[0] == "id":
        label = f"commId {key[1]}"
    elif key[0] == "split" and first.split is not None:
        label = f"split {first.split[1]} of {first.split[0].pointer}, colour {first.split[2]}"
    else:
        label = f"{first.pointer} of {first.process}"
        if first.begins:
            label += f" ({first.begins + 1}. with this pointer)"
    ranks = next((view.ranks for view in views if view.ranks), None)
    nodes = next((view.nodes for view in views if view.nodes is not None), None)
    hosts = tuple(sorted({view.process.rpartition(":")[0] for view in views}))
    return CommunicatorRow(label, role, ranks, nodes, hosts)


def _order(row: VerdictRow) -> tuple[object, ...]:
    return (
        not row.communicator.attributed,
        row.communicator.label,
        row.operation,
        row.size_bytes,
        _PHASES.index(row.phase),
        row.verdict,
        row.kernels,
    )


def _merge_key(key: CallKey, evidence: Sequence[CallEvidence]) -> tuple[object, ...]:
    """Lines of unknown communicators are shown together where they say the same."""
    return key if key.attributed else (("unknown",), *key[1:], _kernels(evidence))


def _kernels(members: Sequence[CallEvidence]) -> tuple[tuple[str, str], ...]:
    return tuple(sorted({(str(part.kind), what) for part in members for what in part.kernels}))


def verdict_of(kinds: Iterable[Kind | None]) -> Verdict:
    """The verdict for calls of these kinds."""
    distinct = set(kinds) - {None}
    if len(distinct) > 1:
        return Verdict.MIXED
    return Verdict(str(distinct.pop()).upper()) if distinct else Verdict.NO_EVIDENCE


def _row(members: list[CallEvidence], communicator: CommunicatorRow) -> VerdictRow:
    key = members[0].key
    verdict = verdict_of(part.kind for part in members)
    told = [part for part in members if part.kind is not None] or members
    counted = {
        verdict_of([kind]): _counted(told, kind) for kind in dict.fromkeys(o.kind for o in told)
    }
    silent = _without_a_line(members)
    if silent and verdict is not Verdict.NO_EVIDENCE:
        counted[Verdict.NO_EVIDENCE] = silent, silent * key.size_bytes
    unlike = [part for kind in _EXPLAINED for part in told if part.kind == kind]
    return VerdictRow(
        communicator=communicator,
        operation=key.operation,
        size_bytes=key.size_bytes,
        bytes_are=key.bytes_are,
        phase=key.phase,
        verdict=verdict,
        calls={verdict: calls for verdict, (calls, _) in counted.items()},
        bytes_by_verdict={verdict: size_bytes for verdict, (_, size_bytes) in counted.items()},
        at_least=any(part.every_rank for part in members) and not key.attributed,
        lines=sum(part.lines.total() for part in members),
        kernels=tuple(dict.fromkeys(what for _, what in _kernels(members))),
        channels=tuple(sorted({number for part in members for number in part.channels})),
        processes=tuple(sorted({process.label for part in told for process in part.processes})),
        quote=next((part.line for part in told if part.line), ""),
        reason=why_not_symmetric(unlike[0]) if unlike else None,
        remarks=tuple(_remarks(members, verdict)),
    )


def channels_text(rows: Iterable[VerdictRow]) -> str:
    """The fewest and the most channels of a launch, `24` or `1 to 6`; "" if no line says."""
    channels = sorted({number for row in rows for number in row.channels})
    return " to ".join(map(str, dict.fromkeys(channels[:1] + channels[-1:])))


def _without_a_line(members: Sequence[CallEvidence]) -> int:
    """Calls whose kernel no line names, of rank 0; of all that print such lines if it is unknown.

    Lines and calls are counted, since a line that stands far behind its call is not matched to it.
    """
    printing = {view.process for view in members[0].views if view.rank == 0}
    printing = printing or {name for m in members if m.kind is not None for name in m.works}
    silent: Counter[str] = Counter()
    for part in members:
        if part.kind is None:
            silent.update(part.works)
        else:
            silent.subtract(part.unmatched)
    return max((0, *(silent[name] for name in printing))) if members[0].key.attributed else 0


def _of_one_rank(per_process: Counter[str], views: Sequence[View]) -> int:
    """Of what every rank counts: the count of rank 0, or the largest where it is not known."""
    root = sum(per_process[view.process] for view in views if view.rank == 0)
    return root or max(per_process.values(), default=0)


def _counted(members: Sequence[CallEvidence], kind: Kind | None) -> tuple[int, int]:
    """Calls of this kind, and their bytes; a batched line carries the sum of its bytes."""
    own = [part for part in members if part.kind == kind]
    per_process: Counter[str] = Counter()
    for part in own:
        per_process += part.works
    lines = calls = per_process.total()
    if kind is None or any(part.every_rank for part in own):
        # Lines of an unknown process may be those of several ranks for one call.
        per_process.update({name: 1 - n for name, n in per_process.items() if is_unknown(name)})
        lines = calls = _of_one_rank(per_process, own[0].views)
    if any(part.batched for part in own):
        lines = sum(part.lines.total() for part in own)
    return calls, own[0].key.size_bytes * lines


def _remarks(members: Sequence[CallEvidence], verdict: Verdict) -> list[str]:
    key = members[0].key
    remarks = []
    if not key.attributed:
        if verdict is Verdict.MIXED:
            remarks.append("more than one communicator may be behind this")
        if any(part.every_rank for part in members):
            remarks.append("2.27 prints this line on every rank of the communicator")
        if any(is_unknown(str(part.key.group[1])) for part in members):
            text = "lines without the prefix of a process: which one printed them is unknown"
            remarks.append(text)
    if any(part.eliminated for part in members):
        remarks.append("the only communicator that can have printed it")
    if any(part.batched for part in members):
        remarks.append("bytes are summed over the calls of a launch")
    if key.bytes_are == "total":
        remarks.append("bytes are the larger of input and output, over all ranks")
    return remarks


def bytes_by_verdict(rows: Iterable[VerdictRow]) -> dict[str, dict[Verdict, int]]:
    """Bytes per operation and verdict: calls x bytes, over all communicators."""
    sizes: dict[str, dict[Verdict, int]] = {}
    for row in (known for known in rows if known.bytes_are != "unknown"):
        own = sizes.setdefault(row.operation, {})
        for verdict, size_bytes in row.bytes_by_verdict.items():
            own[verdict] = own.get(verdict, 0) + size_bytes
    return sizes


Role = tuple[str, frozenset[int]]
"""What a group of ranks is for, and its global ranks."""


@dataclass(frozen=True)
class Audit:
    """Rows and what surrounds them. boundaries_by: how iterations are distinguished, "" if not.

    ranks, roles: what a run of ours recorded, as of `audit_paths`.
    """

    job: LoggedJob
    boundaries_by: str
    ranks: Mapping[str, int]
    roles: tuple[Role, ...]

    @cached_property
    def rows(self) -> tuple[VerdictRow, ...]:
        """All verdicts."""
        return self.rows_after(0)

    @property
    def versions(self) -> tuple[str, ...]:
        """Versions of NCCL, as far as they are known."""
        return tuple(sorted({str(p.versions) for p in self.job.processes.values()}))

    def rows_after(self, iteration: int) -> tuple[VerdictRow, ...]:
        """Rows of what was seen after so many iterations had ended."""
        made = calls_of(self.job, iteration)
        return tuple(rows(made, self._role))

    def _role(self, views: Sequence[View]) -> str:
        """The recorded groups with exactly these ranks; two roles may share their ranks."""
        ranks = next((view.ranks for view in views if view.ranks), None)
        members = {self.ranks.get(self.job.processes[v.process].source) for v in views}
        if None in members:
            return ""
        exact = {role for role, own in self.roles if own == members}
        if not exact and ranks is not None:
            # Logs of some ranks are missing: the one kind of group of this size with the others.
            exact = {r for r, own in self.roles if members <= own and len(own) == ranks}
        return "/".join(sorted(exact))


_OPERATIONS: Final[dict[str, str]] = LINES["operations"]
_KINDS: Final = {name: Verdict(kind) for name, kind in LINES["kinds"].items()}
PROFILES: Final[dict[str, str]] = LINES["profiles"]
_TERM: Final = re.compile(r"(?:([A-Za-z][\w-]*)\.)?([A-Za-z0-9]+)=([A-Za-z_|]+)")

State = Literal["met", "not met", "no evidence"]


@dataclass(frozen=True)
class Requirement:
    """operation: full name. kinds: verdicts that satisfy it. role: of the communicator, "" any."""

    text: str
    operation: str
    kinds: frozenset[Verdict]
    role: str = ""

    def is_about(self, row: VerdictRow) -> bool:
        """Whether the row is of the operation, on a communicator of the role."""
        roles = ("", *row.communicator.role.split("/"))
        return row.operation == self.operation and self.role in roles


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
    terms = [term.strip() for term in text.split(",") if term.strip()]
    if not terms:
        raise UsageError("--require is empty; expected terms such as AG=sym,RS=sym")
    return tuple(map(_parse_term, terms))


def _parse_term(term: str) -> Requirement:
    match = _TERM.fullmatch(term)
    if match is None:
        raise UsageError(
            f"--require: {term[:60]!r} is no requirement; expected OPERATION=KIND such as AG=sym,"
            " AG=sym|ce or inner.AR=sym"
        )
    role, short, kinds = match[1] or "", match[2], match[3].lower().split("|")
    names = (*_OPERATIONS.values(), "Reduce", "Gather", "Scatter")
    full = (name for name in names if name.lower() == short.lower())
    operation = _OPERATIONS.get(short.upper()) or next(full, None)
    if operation is None:
        raise UsageError(
            f"--require: unknown operation {short!r}; expected one of {', '.join(_OPERATIONS)} or a"
            " full name such as AllGather"
        )
    if unknown := [kind for kind in kinds if kind not in _KINDS]:
        raise UsageError(
            f"--require: unknown kind {unknown[0]!r} in {term!r}; expected one of"
            f" {', '.join(_KINDS)}, several joined by |"
        )
    return Requirement(term, operation, frozenset(_KINDS[kind] for kind in kinds), role)


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
    counted, where, refusal = _counted_rows(audit, after_iteration)
    until = audit.job.unread.damaged_until
    # Without boundaries between iterations, damage may be of any.
    least = after_iteration or 0 if audit.boundaries_by else 0
    damaged = {operation for operation, iteration in until.items() if iteration >= least}
    large = f" of {min_bytes:,} bytes or more" if min_bytes else ""
    results = []
    for required in requirements:
        rows = [r for r in counted if required.is_about(r) and r.size_bytes >= min_bytes]
        if refusal or not rows:
            what = f"{required.role} {required.operation}".strip()
            message = refusal or f"the log shows no {what}{large}{where}"
            results.append(Result(required, "no evidence", message))
        else:
            results.append(_judge_rows(required, rows, where, damaged))
    return results


def _counted_rows(audit: Audit, after: int | None) -> tuple[Sequence[VerdictRow], str, str]:
    """Rows that count, how they were chosen, and why none can be chosen."""
    if after is None:
        return audit.rows, "", ""
    if audit.boundaries_by:
        seen = audit.job.iterations_seen or 0
        if seen < after:
            return (), "", f"the log holds the end of {seen} iterations, not of {after}"
        return audit.rows_after(after), f" after iteration {after} ({audit.boundaries_by})", ""
    if any(row.phase for row in audit.rows):  # the log shows a registration
        # Manual registration follows the first iteration, so what comes after it is later still.
        kept = [row for row in audit.rows if row.phase == "after"]
        if after == 1:
            return kept, " after registration (the log marks no iterations)", ""
    return (
        (),
        "",
        f"nothing in the log shows where iteration {after} ends: record it with measure.nccl="
        "evidence, keep the trainer's iteration lines in the same file, or add REG lines, which"
        " show the registration",
    )


def _judge_rows(
    required: Requirement, rows: Sequence[VerdictRow], where: str, damaged: Collection[str]
) -> Result:
    allowed = {*required.kinds, Verdict.NO_EVIDENCE}
    wrong = [row for row in rows if row.foreign_kernels or not set(row.calls) <= allowed]
    if wrong:
        return Result(required, "not met", _wrong(wrong, len(rows)) + where, tuple(wrong))
    silent = [row for row in rows if Verdict.NO_EVIDENCE in row.calls]
    if silent:
        message = (
            f"{len(silent)} of {len(rows)} rows show calls without their kernel{where}:"
            f" {_silence(silent[0])}"
        )
        return Result(required, "no evidence", message, tuple(silent))
    if required.operation in damaged:
        message = (
            f"damaged lines may be about {required.operation} too: the first stand under Reading"
        )
        return Result(required, "no evidence", message)
    return Result(required, "met", f"all {len(rows)} rows{where}")


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
