"""Verdicts: one row per communicator, operation, message size and phase."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

from reports.nccl.calls import CallEvidence, CallGroup, Calls
from reports.nccl.communicators import GroupKey, View
from reports.nccl.job import UNKNOWN_PROCESS
from reports.nccl.model import Kind
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
    """One verdict. calls: by verdict, each at least once, counted over the job.

    at_least: the number of calls is a lower bound, because every rank prints the line and the
    communicator is not known. processes: those that printed it. bytes_by_verdict: calls x bytes.
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


def rows(made: Calls, name: Callable[[GroupKey, list[View]], CommunicatorRow]) -> list[VerdictRow]:
    """All rows; `name` describes a communicator."""
    symmetric_seen = any("symmetric" in group.quotes for group in made.by_key.values())
    communicators = {key: name(key, views) for key, views in made.views.items()}
    unknown = CommunicatorRow("unknown", attributed=False)
    merged: dict[tuple[object, ...], list[CallGroup]] = {}
    for group in made.by_key.values():
        merged.setdefault(_merge_key(group), []).append(group)
    found = []
    for groups in merged.values():
        key = groups[0].key.group
        kinds = sorted({kind for group in groups for (_, _, kind) in group.lines})
        evidence = CallEvidence(
            groups[0],
            next((k for k in ("regular", "hierarchical_ce", "copy_engine") if k in kinds), None),
            made.job,
            tuple(made.views.get(key, ())),
            symmetric_seen,
        )
        found.append(_row(groups, kinds, evidence, communicators.get(key, unknown)))
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


def _merge_key(group: CallGroup) -> tuple[object, ...]:
    """Lines of unknown communicators are shown together where they say the same."""
    key = group.key
    return key if key.attributed else (("unknown",), *key[1:], tuple(sorted(group.kernels)))


def verdict_of(kinds: Iterable[Kind]) -> Verdict:
    """The verdict for calls of these kinds."""
    distinct = set(kinds)
    if len(distinct) > 1:
        return Verdict.MIXED
    return Verdict(distinct.pop().upper()) if distinct else Verdict.NO_EVIDENCE


def _row(
    groups: list[CallGroup],
    kinds: list[Kind],
    evidence: CallEvidence,
    communicator: CommunicatorRow,
) -> VerdictRow:
    key, views = groups[0].key, evidence.views
    verdict = verdict_of(kinds)
    counted = {verdict_of([kind]): _counted(groups, kind, views) for kind in kinds}
    if verdict is Verdict.NO_EVIDENCE:
        silent = _of_one_rank(_per_process(group.silent for group in groups), views)
        counted[verdict] = (silent, silent * key.size_bytes)
    return VerdictRow(
        communicator=communicator,
        operation=key.operation,
        size_bytes=key.size_bytes,
        bytes_are=key.bytes_are,
        phase=key.phase,
        verdict=verdict,
        calls={verdict: calls for verdict, (calls, _) in counted.items()},
        bytes_by_verdict={verdict: size_bytes for verdict, (_, size_bytes) in counted.items()},
        at_least=any(group.every_rank for group in groups) and not key.attributed,
        lines=sum(group.lines.total() for group in groups),
        kernels=tuple(dict.fromkeys(what for g in groups for _, what in sorted(g.kernels))),
        processes=_processes(groups, evidence),
        quote=next((g.quotes[k] for g in groups for k in kinds if k in g.quotes), ""),
        reason=None if set(kinds) == {"symmetric"} else why_not_symmetric(evidence),
        remarks=tuple(_remarks(groups, verdict, views)),
    )


def _per_process(
    counts: Iterable[Mapping[tuple[str, int], int] | Mapping[tuple[str, int, Kind], int]],
    kind: Kind | None = None,
) -> Counter[str]:
    found: Counter[str] = Counter()
    for one in counts:
        for key, count in one.items():
            if kind is None or key[-1] == kind:
                found[key[0]] += count
    return found


def _of_one_rank(per_process: Counter[str], views: tuple[View, ...]) -> int:
    """Of what every rank counts: the count of rank 0, or the largest where it is not known."""
    root = sum(per_process[view.process] for view in views if view.rank == 0)
    return root or max(per_process.values(), default=0)


def _counted(groups: list[CallGroup], kind: Kind, views: tuple[View, ...]) -> tuple[int, int]:
    """Calls behind the lines, and their bytes; a batched line carries the sum of its bytes."""
    size_bytes = groups[0].key.size_bytes
    per_process = _per_process((group.works for group in groups), kind)
    calls = per_process.total()
    if kind == "symmetric" and any(group.every_rank for group in groups):
        # Lines of an unknown process may be those of several ranks for one call.
        per_process[UNKNOWN_PROCESS] = min(per_process[UNKNOWN_PROCESS], 1)
        calls = _of_one_rank(per_process, views)
    if kind == "symmetric" and any(group.batched for group in groups):
        return calls, size_bytes * _per_process((g.lines for g in groups), kind).total()
    return calls, size_bytes * calls


def _processes(groups: list[CallGroup], evidence: CallEvidence) -> tuple[str, ...]:
    names = {process for group in groups for (process, _, _) in group.lines}
    names = names or {process for group in groups for (process, _) in group.silent}
    return tuple(sorted({evidence.job.processes[name].label for name in names}))


def _remarks(groups: list[CallGroup], verdict: Verdict, views: tuple[View, ...]) -> list[str]:
    group = groups[0]
    found = []
    if not group.key.attributed:
        if verdict is Verdict.MIXED:
            found.append("more than one communicator may be behind this")
        if any(one.every_rank for one in groups):
            found.append("2.27 prints this line on every rank of the communicator")
        if any(one.key.group[1] == UNKNOWN_PROCESS for one in groups):
            found.append("lines without the prefix of a process: which one printed them is unknown")
    if group.eliminated:
        found.append("the only communicator that can have printed it")
    if any(one.batched for one in groups):
        found.append("bytes are summed over the calls of a launch")
    if group.key.bytes_are == "total":
        found.append("bytes are the larger of input and output, over all ranks")
    roots = {view.process for view in views if view.rank == 0}
    silent = sum(count for (process, _), count in group.silent.items() if process in roots)
    if silent and verdict is not Verdict.NO_EVIDENCE:
        found.append(f"{silent} more calls without a line")
    return found


def narrowed(made: Calls, after_iteration: int) -> Calls:
    """Only what was seen after so many iterations had ended."""
    found = Calls(made.job, views=made.views)
    for key, group in made.by_key.items():
        one = replace(
            group,
            lines=Counter({k: n for k, n in group.lines.items() if k[1] >= after_iteration}),
            works=Counter({k: n for k, n in group.works.items() if k[1] >= after_iteration}),
            silent=Counter({k: n for k, n in group.silent.items() if k[1] >= after_iteration}),
        )
        if one.lines or one.silent:
            found.by_key[key] = one
    return found
