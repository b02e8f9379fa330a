"""Whether the engines were right: the newest validation of the results folder."""

from __future__ import annotations

from collections.abc import Iterable

from bench.known_failures import PAGE
from bench.store import ResultsStore
from bench.verdict import ValidationRecord
from reports.findings import Findings
from reports.renderers.document import Block, Details, Heading, Paragraph, Section, TableBlock
from reports.renderers.validation_text import (
    check_table,
    failures_in_full,
    headline,
    reasons_table,
    verdict_of,
)


def validation_section(findings: Findings) -> Section | None:
    """None where nothing was validated into this folder."""
    checked = findings.store.validations.newest()
    if checked is None:
        return None
    return Section("validation", "Correctness", tuple(_checked(checked)))


def verdict_lines(store: ResultsStore, engines: Iterable[str]) -> tuple[tuple[str, str], ...]:
    """Of each engine, whether it was right: its newest validation, and how much of it that was.

    Nothing where there is none.
    """
    newest = {e: store.validations.newest(e) for e in engines}
    return tuple(
        (
            engine,
            f"{verdict_of(record, engine)} in the validation of {record.started_utc[:10]}"
            f"{_extent(record)}; what is known: {PAGE}",
        )
        for engine, record in newest.items()
        if record is not None
    )


def _extent(record: ValidationRecord) -> str:
    parts = [record.wanted] * bool(record.wanted) + ["interrupted"] * record.interrupted
    return f" ({', '.join(parts)})" if parts else ""


def _checked(record: ValidationRecord) -> list[Block]:
    blocks: list[Block] = [
        Paragraph(
            "Every case runs an engine on a small model and compares gradients, weights, losses, "
            "wire and memory with plain torch in one process. Validations do not belong to a "
            "sweep: this is the newest of the results folder.",
            tone="note",
        ),
        Paragraph(_dated(record), tone="warning" if record.counts()["failed"] else "plain"),
        TableBlock(check_table(record)),
    ]
    failures = failures_in_full(record)
    if failures:
        blocks.append(Details("What failed", "\n\n".join(failures)))
    reasons = reasons_table(record)
    if reasons.rows:
        blocks += [Heading("What does not apply, and why"), TableBlock(reasons)]
    lines = [
        f"{case.state if case.state == 'passed' else 'FAILED':7} {case.case}"
        for case in record.cases
        if case.state != "not_applicable"
    ]
    blocks.append(Details(f"All {len(lines)} cases that ran", "\n".join(lines)))
    return blocks


def _dated(record: ValidationRecord) -> str:
    commit = str(record.environment.get("git", {}).get("commit") or "unknown")[:12]
    return f"{headline(record)}. Started {record.started_utc}, commit {commit}."
