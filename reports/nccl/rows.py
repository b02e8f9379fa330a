"""Verdicts: one row per communicator, operation, message size and phase.

Hints are what the lines suggest beyond what they prove: for a reader, never for a verdict.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from reports.nccl.conditions import Reason, why_not_symmetric
from reports.nccl.job import GroupKey, View
from reports.nccl.model import Kind, Versions
from reports.nccl.replay import CallEvidence, CallGroup, CallGroupKey, Replay


class Verdict(StrEnum):
    """What the log proves. NO_EVIDENCE is not a kind of REGULAR."""

    SYMMETRIC = "SYMMETRIC"
    REGULAR = "REGULAR"
    COPY_ENGINE = "COPY_ENGINE"
    HIERARCHICAL_CE = "HIERARCHICAL_CE"
    MIXED = "MIXED"
    NO_EVIDENCE = "NO_EVIDENCE"


_BY_KIND: dict[Kind, Verdict] = {
    "symmetric": Verdict.SYMMETRIC,
    "regular": Verdict.REGULAR,
    "copy_engine": Verdict.COPY_ENGINE,
    "hierarchical_ce": Verdict.HIERARCHICAL_CE,
}


@dataclass(frozen=True)
class Communicator:
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
class Row:
    """One verdict. calls: by verdict, each at least once, counted over the job.

    at_least: the number of calls is a lower bound, because every rank prints the line and the
    communicator is not known. processes: those that printed it. bytes_by_verdict: calls x bytes.
    unexplained_calls: calls on rank 0 without a line, beside others with one.
    """

    communicator: Communicator
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


def rows(made: Replay, name: Callable[[GroupKey, list[View]], Communicator]) -> list[Row]:
    """All rows; `name` describes a communicator."""
    symmetric_line = _symmetric_line(made)
    communicators = {key: name(key, views) for key, views in made.groups.items()}
    merged: dict[tuple[object, ...], list[CallGroup]] = {}
    for cell in made.cells.values():
        merged.setdefault(_merge_key(cell), []).append(cell)
    found = []
    for cells in merged.values():
        key = cells[0].key
        communicator = communicators.get(key.group) if key.attributed else None
        views = tuple(made.groups.get(key.group, ())) if key.attributed else ()
        found.append(_row(cells, communicator, views, made, symmetric_line))
    return sorted(found, key=_order)


def _order(row: Row) -> tuple[object, ...]:
    phases = ("before", "after", "")
    one = row.communicator
    return (
        not one.attributed,
        one.label,
        row.operation,
        row.size_bytes,
        phases.index(row.phase),
        row.verdict,
        row.kernels,
    )


def _symmetric_line(made: Replay) -> str:
    quotes = [c.quotes["symmetric"] for c in made.cells.values() if "symmetric" in c.quotes]
    return min(quotes, default="")


def _merge_key(cell: CallGroup) -> tuple[object, ...]:
    """Lines of unknown communicators are shown together where they say the same."""
    if cell.key.attributed:
        return (cell.key,)
    key = cell.key
    shown = tuple(sorted(cell.kernels))
    return ("unknown", key.operation, key.size_bytes, key.bytes_are, key.phase, shown)


def verdict_of(kinds: Iterable[Kind]) -> Verdict:
    """The verdict for calls of these kinds."""
    distinct = set(kinds)
    if not distinct:
        return Verdict.NO_EVIDENCE
    return _BY_KIND[distinct.pop()] if len(distinct) == 1 else Verdict.MIXED


def _row(
    cells: list[CallGroup],
    communicator: Communicator | None,
    views: tuple[View, ...],
    made: Replay,
    symmetric_line: str,
) -> Row:
    cell = cells[0]
    key = cell.key
    kinds = sorted({kind for (_, _, kind) in cell.lines})
    verdict = verdict_of(kinds)
    calls: dict[Verdict, int] = {}
    sizes: dict[Verdict, int] = {}
    for kind in kinds:
        counted = _calls(cells, kind, views)
        calls[_BY_KIND[kind]] = counted
        sizes[_BY_KIND[kind]] = _bytes(cells, kind, counted)
    if verdict is Verdict.NO_EVIDENCE:
        calls[verdict] = _silent(cells, views)
        sizes[verdict] = calls[verdict] * key.size_bytes
    case = _case(cell, kinds, made, views, symmetric_line)
    reason = None if case is None else why_not_symmetric(case)
    every_rank = any(c.every_rank for c in cells)
    return Row(
        communicator=communicator or Communicator("unknown", attributed=False),
        operation=key.operation,
        size_bytes=key.size_bytes,
        bytes_are=key.bytes_are,
        phase=key.phase,
        verdict=verdict,
        calls=calls,
        bytes_by_verdict=sizes,
        at_least=every_rank and not key.attributed,
        lines=sum(n for c in cells for n in c.lines.values()),
        kernels=tuple(dict.fromkeys(what for c in cells for _, what in sorted(c.kernels))),
        processes=tuple(sorted(_processes(cells, made))),
        quote=next((c.quotes[k] for c in cells for k in kinds if k in c.quotes), ""),
        reason=reason,
        remarks=_remarks(cells, verdict, views),
    )


def _case(
    cell: CallGroup, kinds: list[Kind], made: Replay, views: tuple[View, ...], symmetric_line: str
) -> CallEvidence | None:
    """The calls that need a reason: those of the first kind that is not symmetric."""
    other = [kind for kind in ("regular", "hierarchical_ce", "copy_engine") if kind in kinds]
    if not kinds:
        return CallEvidence(cell, None, made.job, views, symmetric_line)
    if not other:
        return None
    kind: Kind = next(k for k in kinds if k == other[0])
    return CallEvidence(cell, kind, made.job, views, symmetric_line)


def _calls(cells: list[CallGroup], kind: Kind, views: tuple[View, ...]) -> int:
    """Calls behind the lines: one rank's, where every rank prints them."""
    per_process: Counter[str] = Counter()
    for cell in cells:
        for (process, _, k), count in cell.works.items():
            if k == kind:
                per_process[process] += count
    if not (kind == "symmetric" and any(cell.every_rank for cell in cells)):
        return per_process.total()
    roots = [view.process for view in views if view.rank == 0]
    root = sum(per_process[process] for process in roots)
    return root or max(per_process.values(), default=0)


def _bytes(cells: list[CallGroup], kind: Kind, calls: int) -> int:
    """Calls x bytes; a batched line whose calls are not known carries the sum of their bytes."""
    size_bytes = cells[0].key.size_bytes
    if kind == "symmetric" and any(cell.batched for cell in cells):
        lines = sum(n for c in cells for (_, _, k), n in c.lines.items() if k == kind)
        return lines * size_bytes
    return calls * size_bytes


def _silent(cells: list[CallGroup], views: tuple[View, ...]) -> int:
    per_process: Counter[str] = Counter()
    for cell in cells:
        for (process, _), count in cell.silent.items():
            per_process[process] += count
    roots = [view.process for view in views if view.rank == 0]
    return sum(per_process[p] for p in roots) or max(per_process.values(), default=0)


def _processes(cells: list[CallGroup], made: Replay) -> set[str]:
    names = {process for cell in cells for (process, _, _) in cell.lines}
    names = names or {process for cell in cells for (process, _) in cell.silent}
    return {made.job.processes[name].label for name in names}


def _remarks(cells: list[CallGroup], verdict: Verdict, views: tuple[View, ...]) -> tuple[str, ...]:
    cell = cells[0]
    found = []
    if not cell.key.attributed:
        if verdict is Verdict.MIXED:
            found.append("more than one communicator may be behind this")
        if any(c.every_rank for c in cells):
            found.append("2.27 prints this line on every rank of the communicator")
    if cell.eliminated:
        found.append("the only communicator that can have printed it")
    if any(c.batched for c in cells):
        found.append("bytes are summed over the calls of a launch")
    if cell.key.bytes_are == "total":
        found.append("bytes are the larger of input and output, over all ranks")
    silent = 0 if verdict is Verdict.NO_EVIDENCE else _unexplained(cell, views)
    if silent:
        found.append(f"{silent} more calls without a line")
    return tuple(found)


def _unexplained(cell: CallGroup, views: tuple[View, ...]) -> int:
    roots = {view.process for view in views if view.rank == 0}
    return sum(n for (process, _), n in cell.silent.items() if process in roots)


def narrowed(made: Replay, after_iteration: int) -> Replay:
    """Only what was seen after so many iterations had ended."""

    def kept(cell: CallGroup) -> CallGroup:
        lines = Counter({k: n for k, n in cell.lines.items() if k[1] >= after_iteration})
        works = Counter({k: n for k, n in cell.works.items() if k[1] >= after_iteration})
        silent = Counter({k: n for k, n in cell.silent.items() if k[1] >= after_iteration})
        return replace(cell, lines=lines, works=works, silent=silent)

    cells: dict[CallGroupKey, CallGroup] = {}
    for key, cell in made.cells.items():
        one = kept(cell)
        if one.lines or one.silent:
            cells[key] = one
    return Replay(made.job, cells, made.groups)


_MOST_RATIO = 64
_SMALLEST_COMPARED_BYTES = 4096
_MOST_HINTS = 8


def hints(made: Replay, rows: Sequence[Row]) -> list[str]:
    """Sentences, each with the observation that it rests on."""
    unknown = [row for row in rows if not row.communicator.attributed]
    if not unknown:
        return []
    found = [
        *_version(made, unknown),
        *_brackets(unknown),
        *_roots(unknown),
        *_cascades(unknown),
        *_no_multicast(unknown),
    ]
    return found[:_MOST_HINTS]


def _version(made: Replay, rows: Sequence[Row]) -> Iterator[str]:
    stated = any(process.version_line for process in made.job.processes.values())
    versions = {process.versions for process in made.job.processes.values()}
    if stated or len(versions) != 1 or versions == {Versions()} or not rows:
        return
    yield f"No line states the version; the forms of the lines are those of {versions.pop()}."


def _brackets(rows: Sequence[Row]) -> Iterator[str]:
    if rows:
        yield (
            "The number in brackets is the local CUDA device, not a rank, and without COLL lines no"
            " line says which communicator it is about."
        )
    if any(row.at_least for row in rows):
        yield (
            "Symmetric lines of 2.27 are printed by every rank, all others by rank 0 of the"
            " communicator alone: that a process prints only symmetric lines says nothing about its"
            " other collectives, and which processes print none proves nothing."
        )


def _roots(rows: Sequence[Row]) -> Iterator[str]:
    """The same regular line from two processes comes from two communicators."""
    for row in rows:
        if row.verdict is Verdict.REGULAR and len(row.processes) > 1:
            shown = ", ".join(row.processes[:4])
            yield (
                f"{shown} each print {row.operation} of {row.size_bytes:,} bytes as rank 0 of a"
                f" communicator: there are at least {len(row.processes)} of them."
            )
            return


def _cascades(rows: Sequence[Row]) -> Iterator[str]:
    """Sizes that are an exact multiple of another process's, as in a reduction over two axes."""
    scatters = [
        row
        for row in rows
        if row.operation == "ReduceScatter" and row.size_bytes > _SMALLEST_COMPARED_BYTES
    ]
    for large in scatters:
        for small in scatters:
            ratio = large.size_bytes // small.size_bytes
            apart = not set(large.processes) & set(small.processes)
            if apart and large.size_bytes == ratio * small.size_bytes and 1 < ratio <= _MOST_RATIO:
                printing = ", ".join(large.processes[:2])
                yield (
                    f"ReduceScatter of {large.size_bytes:,} bytes ({printing})"
                    f" is exactly {ratio} x the {small.size_bytes:,} bytes of"
                    f" {', '.join(small.processes[:4])}: this looks like a reduction over an inner"
                    f" axis, then over an outer one of {ratio} ranks."
                )
                return


def _no_multicast(rows: Sequence[Row]) -> Iterator[str]:
    kernels = {k for row in rows if row.verdict is Verdict.SYMMETRIC for k in row.kernels}
    plain = sorted(k for k in kernels if "MC" not in k and not k.startswith(("AllGather_Rail",)))
    if plain and len(plain) == len(kernels):
        yield (
            f"{', '.join(plain)} uses no multicast (no MC in its name): its communicator has no"
            " NVLS, which needs more than two local ranks."
        )
