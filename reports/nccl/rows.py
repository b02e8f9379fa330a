"""Verdicts: one row per communicator, operation, message size and phase."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from reports.nccl.calls import CallEvidence, CallKey, Calls
from reports.nccl.communicators import GroupKey, View
from reports.nccl.events import COLLECTIVES, Kind
from reports.nccl.job import is_unknown
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
    bytes_by_verdict: calls x bytes.
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
    processes: tuple[str, ...]
    quote: str
    reason: Reason | None
    remarks: tuple[str, ...] = ()

    @property
    def foreign_kernels(self) -> tuple[str, ...]:
        """Kernels that carry the name of another operation: what says so contradicts itself."""
        named = ((kernel, kernel.partition("_")[0]) for kernel in self.kernels)
        return tuple(k for k, name in named if name in COLLECTIVES and name != self.operation)


def rows(made: Calls, name: Callable[[GroupKey, list[View]], CommunicatorRow]) -> list[VerdictRow]:
    """All rows; `name` describes a communicator."""
    communicators = {key: name(key, views) for key, views in made.views.items()}
    unknown = CommunicatorRow("unknown", attributed=False)
    merged: dict[tuple[object, ...], list[CallEvidence]] = {}
    for key, kinds in made.by_key.items():
        own = [kinds[kind] for kind in sorted(kinds, key=str)]
        merged.setdefault(_merge_key(key, own), []).extend(own)
    found = [_row(own, communicators.get(own[0].key.group, unknown)) for own in merged.values()]
    return sorted(found, key=_order)


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


def _merge_key(key: CallKey, own: Sequence[CallEvidence]) -> tuple[object, ...]:
    """Lines of unknown communicators are shown together where they say the same."""
    return key if key.attributed else (("unknown",), *key[1:], _kernels(own))


def _kernels(members: Sequence[CallEvidence]) -> tuple[tuple[str, str], ...]:
    return tuple(sorted({(str(one.kind), what) for one in members for what in one.kernels}))


def verdict_of(kinds: Iterable[Kind | None]) -> Verdict:
    """The verdict for calls of these kinds."""
    distinct = set(kinds) - {None}
    if len(distinct) > 1:
        return Verdict.MIXED
    return Verdict(str(distinct.pop()).upper()) if distinct else Verdict.NO_EVIDENCE


def _row(members: list[CallEvidence], communicator: CommunicatorRow) -> VerdictRow:
    key = members[0].key
    verdict = verdict_of(one.kind for one in members)
    told = [one for one in members if one.kind is not None] or members
    counted = {
        verdict_of([kind]): _counted(told, kind) for kind in dict.fromkeys(o.kind for o in told)
    }
    silent = _without_a_line(members)
    if silent and verdict is not Verdict.NO_EVIDENCE:
        counted[Verdict.NO_EVIDENCE] = silent, silent * key.size_bytes
    unlike = [one for kind in _EXPLAINED for one in told if one.kind == kind]
    return VerdictRow(
        communicator=communicator,
        operation=key.operation,
        size_bytes=key.size_bytes,
        bytes_are=key.bytes_are,
        phase=key.phase,
        verdict=verdict,
        calls={verdict: calls for verdict, (calls, _) in counted.items()},
        bytes_by_verdict={verdict: size_bytes for verdict, (_, size_bytes) in counted.items()},
        at_least=any(one.every_rank for one in members) and not key.attributed,
        lines=sum(one.lines.total() for one in members),
        kernels=tuple(dict.fromkeys(what for _, what in _kernels(members))),
        processes=tuple(sorted({process.label for one in told for process in one.processes})),
        quote=next((one.line for one in told if one.line), ""),
        reason=why_not_symmetric(unlike[0]) if unlike else None,
        remarks=tuple(_remarks(members, verdict)),
    )


def _without_a_line(members: Sequence[CallEvidence]) -> int:
    """Calls whose kernel no line names, of rank 0; of all that print such lines if it is unknown.

    Lines and calls are counted, since a line that stands far behind its call is not matched to it.
    """
    printing = {view.process for view in members[0].views if view.rank == 0}
    printing = printing or {name for one in members if one.kind is not None for name in one.works}
    silent: Counter[str] = Counter()
    for one in members:
        if one.kind is None:
            silent.update(one.works)
        else:
            silent.subtract(one.unmatched)
    return max((0, *(silent[name] for name in printing))) if members[0].key.attributed else 0


def _of_one_rank(per_process: Counter[str], views: Sequence[View]) -> int:
    """Of what every rank counts: the count of rank 0, or the largest where it is not known."""
    root = sum(per_process[view.process] for view in views if view.rank == 0)
    return root or max(per_process.values(), default=0)


def _counted(members: Sequence[CallEvidence], kind: Kind | None) -> tuple[int, int]:
    """Calls of this kind, and their bytes; a batched line carries the sum of its bytes."""
    own = [one for one in members if one.kind == kind]
    per_process: Counter[str] = Counter()
    for one in own:
        per_process += one.works
    lines = calls = per_process.total()
    if kind is None or any(one.every_rank for one in own):
        # Lines of an unknown process may be those of several ranks for one call.
        per_process.update({name: 1 - n for name, n in per_process.items() if is_unknown(name)})
        lines = calls = _of_one_rank(per_process, own[0].views)
    if any(one.batched for one in own):
        lines = sum(one.lines.total() for one in own)
    return calls, own[0].key.size_bytes * lines


def _remarks(members: Sequence[CallEvidence], verdict: Verdict) -> list[str]:
    key = members[0].key
    found = []
    if not key.attributed:
        if verdict is Verdict.MIXED:
            found.append("more than one communicator may be behind this")
        if any(one.every_rank for one in members):
            found.append("2.27 prints this line on every rank of the communicator")
        if any(is_unknown(str(one.key.group[1])) for one in members):
            found.append("lines without the prefix of a process: which one printed them is unknown")
    if any(one.eliminated for one in members):
        found.append("the only communicator that can have printed it")
    if any(one.batched for one in members):
        found.append("bytes are summed over the calls of a launch")
    if key.bytes_are == "total":
        found.append("bytes are the larger of input and output, over all ranks")
    return found


def bytes_by_verdict(rows: Iterable[VerdictRow]) -> dict[str, dict[Verdict, int]]:
    """Bytes per operation and verdict: calls x bytes, over all communicators."""
    found: dict[str, dict[Verdict, int]] = {}
    for row in (one for one in rows if one.bytes_are != "unknown"):
        own = found.setdefault(row.operation, {})
        for verdict, size_bytes in row.bytes_by_verdict.items():
            own[verdict] = own.get(verdict, 0) + size_bytes
    return found
