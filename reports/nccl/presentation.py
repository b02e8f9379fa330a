"""An audit as tables and sentences, the same for terminal, Markdown and HTML.

Then the audit for a terminal and a pull request, as plain data, and its requirements as JUnit: one
test case each, so that a CI system shows them like tests.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any, Final

from reports.nccl.events import ANY, SAID
from reports.nccl.job import is_unknown
from reports.nccl.reasons import COPIED, Reason, copy_engine_policy
from reports.nccl.verdicts import (
    Audit,
    CommunicatorRow,
    Result,
    Verdict,
    VerdictRow,
    bytes_by_verdict,
    channels_text,
)
from reports.renderers.document import Block, Bullets, Heading, TableBlock
from reports.renderers.printable import printable
from reports.renderers.quantity import binary_bytes, counted, significant
from reports.renderers.render import Finding, junit
from reports.renderers.table import Row, RowKind, Table

_KINDS: Final[dict[Verdict, RowKind]] = {
    Verdict.NO_EVIDENCE: "unsteady",
    Verdict.MIXED: "bad",
    Verdict.REGULAR: "bad",
}
_MOST_REASONS = 40
_SHOWN_HOSTS = 4


def communicator_text(row: CommunicatorRow) -> str:
    """Role, identifier and size of a communicator."""
    if not row.attributed:
        return "unknown"
    sizes = []
    if row.ranks is not None:
        sizes.append(f"{row.ranks} ranks")
    if row.nodes is not None:
        sizes.append(counted(row.nodes, "node"))
    if row.nodes is None or row.nodes > 1:
        shown = ", ".join(row.hosts[:_SHOWN_HOSTS])
        more = len(row.hosts) - _SHOWN_HOSTS
        part = "seen on " if len(row.hosts) != row.nodes else ""
        if len(row.hosts) > 1 or row.nodes:
            sizes.append(f"{part}{shown}" + (f" and {more} more" if more > 0 else ""))
    return f"{row.role} {row.label}".strip() + (f" ({', '.join(sizes)})" if sizes else "")


def calls_text(row: VerdictRow) -> str:
    """Calls by verdict; one number where there is one verdict."""
    least = ">= " if row.at_least else ""
    if len(row.calls) == 1:
        return least + str(next(iter(row.calls.values())))
    return least + ", ".join(f"{count} {verdict.lower()}" for verdict, count in row.calls.items())


def rows_table(audit: Audit) -> Table:
    """All rows."""
    titles = "communicator | operation | bytes | phase | verdict | kernel | channels | calls"
    rows = map(_table_row, audit.rows)
    return replace(Table.of(f"{titles} | printed by", rows, left=2), bad="not symmetric")


def _table_row(row: VerdictRow) -> Row:
    size = f"{row.size_bytes:,}" + (" total" if row.bytes_are == "total" else "")
    size = "cut off" if row.bytes_are == "unknown" else size
    kernels = ", ".join(row.kernels[:3]) + (", ..." if len(row.kernels) > 3 else "") or "-"  # noqa: PLR2004
    more = len(row.processes) - 1
    printed = (row.processes[0] if row.processes else "-") + (f" +{more}" if more > 0 else "")
    texts = (
        communicator_text(row.communicator),
        row.operation,
        size,
        f"{row.phase} registration" if row.phase else "-",
        str(row.verdict),
        kernels,
        channels_text([row]) or "-",
        calls_text(row),
        printed,
    )
    return Row(texts, _KINDS.get(row.verdict, "plain"))


def reason_lines(audit: Audit) -> Bullets:
    """Every reason once, behind the rows it explains, with what shows it below."""
    grouped: dict[tuple[object, ...], list[VerdictRow]] = {}
    for row in audit.rows:
        if row.reason is not None:
            reason = row.reason
            key = (row.operation, reason.condition, reason.text, reason.candidates, reason.missing)
            grouped.setdefault(key, []).append(row)
    lines = [_reason_line(members) for members in list(grouped.values())[:_MOST_REASONS]]
    return Bullets(tuple(line[:2] for line in lines), tuple(line[2] for line in lines))


def _reason_line(members: Sequence[VerdictRow]) -> tuple[str, str, tuple[str, ...]]:
    """Title, sentence and details."""
    first = members[0]
    reason = first.reason
    sizes = sorted({row.size_bytes for row in members if row.bytes_are != "unknown"})
    shown = ", ".join(f"{size:,}" for size in sizes[:4]) + (", ..." if len(sizes) > 4 else "")  # noqa: PLR2004
    verdicts = "/".join(dict.fromkeys(str(row.verdict) for row in members))
    title = f"{first.operation} {verdicts} ({shown + ' bytes' if shown else 'bytes cut off'})"
    if reason is None:
        return title, "", ()
    details = []
    if reason.candidates:
        details.append("may be: " + "; ".join(reason.candidates))
    if reason.missing:
        details.append(f"missing: {', '.join(reason.missing)}; settled by {reason.settled_by}")
    if reason.quote:
        details.append(f"line: {reason.quote}")
    remarks = dict.fromkeys(remark for row in members for remark in row.remarks)
    details += [f"note: {remark}" for remark in remarks]
    return title, f"{reason.condition}: {reason.text}".removeprefix(": "), tuple(details)


def bytes_table(audit: Audit) -> Table:
    """Bytes per operation by verdict."""
    verdicts = [v for v in Verdict if v is not Verdict.MIXED]
    rows = (
        (name, *(binary_bytes(own.get(verdict)) for verdict in verdicts))
        for name, own in sorted(bytes_by_verdict(audit.rows).items())
    )
    return Table.of(("operation", *map(str, verdicts)), rows)


def results_table(results: Sequence[Result]) -> Table:
    """Requirements and their results."""
    rows = (
        Row(
            (result.requirement.text, result.state.upper(), result.message),
            "plain" if result.state == "met" else "bad",
        )
        for result in results
    )
    return Table.of("requirement | result | detail", rows, left=3)


def reading_facts(audit: Audit) -> list[str]:
    """What was read, what was not understood, and what is odd."""
    unread, job = audit.job.unread, audit.job
    known = sum(not is_unknown(name) for name in job.processes)
    seen = [f"{counted(known, 'process', 'processes')} on {counted(len(job.hosts), 'host')}"]
    if known < len(job.processes):
        seen = [*(seen if known else ()), "an unknown process"]
    facts = [
        f"NCCL {', '.join(audit.versions) or 'unknown'}; {' and '.join(seen)};"
        f" {job.lines:,} NCCL lines in {job.bytes_read:,} bytes"
    ]
    counts = {
        "NCCL lines not understood": unread.unknown.total(),
        "pieces of cut or glued lines": unread.damaged,
        "lines too long to read": unread.overlong,
    }
    if any(counts.values()):
        facts.append(", ".join(f"{count:,} {words}" for words, count in counts.items() if count))
    most = unread.unknown.most_common(5)
    facts += [f"not understood, {n:,} x: {unread.examples.get(s, s)}" for s, n in most]
    facts += [f"damaged: {text}" for text in unread.damaged_examples]
    facts += [
        f"{words}: {line}" + (f" (and {others} other processes)" if others else "")
        for _, words, line, others in said(audit)[:_MOST_SAID]
    ]
    facts += [f"warning: {remark}" for remark in job.remarks]
    return facts


_MOST_SAID = 12


def said(audit: Audit) -> list[tuple[str, str, str, int]]:
    """(kind, in words, line, how many other processes) of lines that decide no verdict alone.

    A copy engine that was requested is among them, with the operations that did not take it.
    """
    first: dict[tuple[str, str], tuple[str, str, str]] = {}
    counts: Counter[tuple[str, str]] = Counter()
    for process in audit.job.processes.values():
        lines = {(e.kind, str(e.values[0]) if e.values else ""): e.text
                 for kind in SAID for e in process.events(kind)}  # fmt: skip
        for key, text in lines.items():
            counts[key] += 1
            first.setdefault(key, (key[0], SAID[key[0]], text))
        requested = copy_engine_policy(process)
        without = _not_copied(audit, process.label) if requested else []
        if requested and without:
            words = f"the copy engine was requested, and not taken by {', '.join(without)}"
            counts["copy_engine", words] += 1
            first.setdefault(("copy_engine", words), ("copy_engine", words, requested.text))
    return [(*line, counts[key] - 1) for key, line in first.items()]


def _not_copied(audit: Audit, process: str) -> list[str]:
    taken = {"COPY_ENGINE", "HIERARCHICAL_CE", "NO_EVIDENCE"}
    own = [row for row in audit.rows if process in row.processes and row.operation in COPIED]
    return sorted({row.operation for row in own if not {*map(str, row.calls)} <= taken})


def times_table(audit: Audit) -> Table:
    """What NCCL's Inspector has timed."""
    titles = "operation | bytes | ranks | kernel | records | median us | min us | max us | bus GB/s"
    rows = (
        (
            row.operation,
            f"{row.size_bytes:,}",
            str(row.ranks or "-"),
            row.kernel or "-",
            f"{row.records:,}",
            *map(significant, row[5:]),
        )
        for row in audit.job.times.rows()
    )
    return Table.of(titles, rows)


def hints(audit: Audit) -> list[str]:
    """How to read lines of which it is not known which communicator they are about."""
    unknown = [row for row in audit.rows if not row.communicator.attributed]
    stated = any(process.version_line for process in audit.job.processes.values())
    versions = {process.versions for process in audit.job.processes.values()}
    texts = []
    if unknown and not stated and len(versions) == 1 and versions != {ANY}:
        forms = versions.pop()
        texts.append(f"No line states the version; the forms of the lines are those of {forms}.")
    if not all(is_unknown(name) for row in unknown for name in row.processes):
        texts.append(
            "The number in brackets is the local CUDA device, not a rank, and without COLL lines no"
            " line says which communicator it is about."
        )
    if any(row.at_least for row in unknown):
        texts.append(
            "Symmetric lines of 2.27 are printed by every rank, all others by rank 0 of the"
            " communicator alone: that a process prints only symmetric lines says nothing about its"
            " other collectives, and which processes print none proves nothing."
        )
    return texts


_MOST_ROWS = 400
_LONGEST_DETAIL = 400


def audit_blocks(audit: Audit, results: Sequence[Result] = ()) -> list[Block]:
    """Headings with tables or lists, the outcome first; what is empty is left out."""
    verdicts, read = rows_table(audit), reading_facts(audit)
    if len(verdicts.rows) > _MOST_ROWS:
        read.append(f"{len(verdicts.rows) - _MOST_ROWS} more rows are left out; --json holds all")
    reasons = reason_lines(audit)
    details = tuple(tuple(map(_cut, below)) for below in reasons.below)
    parts: list[tuple[str, Table | Bullets]] = [
        ("Requirements", results_table(results)),
        ("Verdicts", replace(verdicts, rows=verdicts.rows[:_MOST_ROWS])),
        ("Bytes by verdict", bytes_table(audit)),
        ("Times per collective (NCCL Inspector)", times_table(audit)),
        ("Why not symmetric", replace(reasons, below=details)),
        ("What the lines suggest (no verdict rests on this)", _list(hints(audit))),
        ("Reading", _list(read)),
    ]
    blocks: list[Block] = []
    for title, part in parts:
        if part.rows if isinstance(part, Table) else part.items:
            blocks += [Heading(title), TableBlock(part) if isinstance(part, Table) else part]
    return blocks


def _list(texts: Sequence[str]) -> Bullets:
    return Bullets(tuple(("", _cut(text)) for text in texts))


def _cut(text: str) -> str:
    """Text from a log can be of any length."""
    return printable(text, _LONGEST_DETAIL)


FORMAT_VERSION: Final = 1


def to_data(audit: Audit, results: Sequence[Result] = ()) -> dict[str, Any]:
    """Everything, ready for `json.dumps`."""
    unread, job = audit.job.unread, audit.job
    lines = [
        {"kind": kind, "line": line, "other_processes": others}
        for kind, _, line, others in said(audit)
    ]
    times = [row._asdict() for row in job.times.rows()]
    return {
        "format": FORMAT_VERSION,
        "nccl_versions": list(audit.versions),
        "processes": len(job.processes),
        "hosts": len(job.hosts),
        "nccl_lines": job.lines,
        "bytes_read": job.bytes_read,
        "iterations": {"seen": job.iterations_seen, "by": audit.boundaries_by or None},
        "rows": [_row(row) for row in audit.rows],
        "bytes_by_verdict": dict(sorted(bytes_by_verdict(audit.rows).items())),
        "hints": hints(audit),
        "requirements": [
            {
                "requirement": result.requirement.text,
                "operation": result.requirement.operation,
                "state": result.state,
                "message": result.message,
                "failing_rows": len(result.failing),
            }
            for result in results
        ],
        "requirements_met": all(result.state == "met" for result in results) if results else None,
        "not_understood": {
            "lines": unread.unknown.total(),
            "damaged": unread.damaged,
            "overlong": unread.overlong,
            "ignored": unread.ignored,
            "forms": [
                {"count": count, "example": unread.examples.get(shape, shape)}
                for shape, count in unread.unknown.most_common(20)
            ],
            "damaged_examples": unread.damaged_examples,
        },
        "remarks": job.remarks,
    } | {name: records for name, records in (("said", lines), ("inspector", times)) if records}


# In JSON, where it is not the name of the field.
_NAMES: Final = {
    "label": "communicator",
    "attributed": "communicator_known",
    "size_bytes": "bytes",
    "at_least": "calls_are_at_least",
    "processes": "printed_by",
    "quote": "line",
}


def _row(row: VerdictRow) -> dict[str, Any]:
    reason = row.reason
    return (_fields(row) | _fields(row.communicator)) | {
        "bytes": None if row.bytes_are == "unknown" else row.size_bytes,
        "reason": reason and _fields(reason) | {"settled_by": reason.settled_by or None},
    }


def _fields(record: VerdictRow | CommunicatorRow | Reason) -> dict[str, Any]:
    """By their names in JSON, None for an empty text."""
    values = ((field.name, getattr(record, field.name)) for field in fields(record))
    return {_NAMES.get(name, name): None if value == "" else value for name, value in values}


def to_junit(results: Sequence[Result]) -> str:
    """An XML document; a requirement without evidence is a failure of its own type."""
    kinds = {"no evidence": "NoEvidence", "not met": "RequirementNotMet"}
    findings = (
        Finding("nccl", r.requirement.text)
        if r.state == "met"
        else Finding("nccl", r.requirement.text, r.message, "failure", kinds[r.state])
        for r in results
    )
    return junit("mfsdp-bench nccl", "NCCL requirements", findings)
