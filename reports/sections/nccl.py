"""Which NCCL kernels ran, and in which dtype gradients were added up; from logs when read."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from bench.errors import NothingMeasuredError
from reports.findings import Findings
from reports.nccl import expectations
from reports.nccl.audit import audit_run
from reports.nccl.presentation import bytes_table, reading_facts, reason_lines, rows_table
from reports.nccl.verdicts import Audit
from reports.renderers.document import (
    Block,
    Bullets,
    Details,
    Heading,
    Paragraph,
    TableBlock,
    note,
    warning,
)
from reports.renderers.table import Table
from reports.views.cells import Cell

_MOST_ROWS = 200


class Proof(NamedTuple):
    """What a log proves of a cell's kernels, in a few words, and what was requested in vain."""

    text: str
    shortfalls: tuple[str, ...]


def proofs(findings: Findings) -> dict[str, Proof]:
    """By name of the cell: from its own log, else that of a cell that differs in nothing else.

    Cells that requested nothing of NCCL and have no log are left out.
    """
    proved: dict[str, Proof] = {}
    for cell, source, audit in audits(findings):
        if source is not None or expectations.expectations_of(cell.resolved):
            text = "no log" if audit is None else expectations.verdict_text(audit)
            proved[cell.name] = Proof(text, tuple(expectations.shortfalls(cell.resolved, audit)))
    return proved


def audits(findings: Findings) -> Iterator[tuple[Cell, Cell | None, Audit | None]]:
    """Every cell, the cell whose runs logged what it does, and the first log that can be read."""
    logged = {_workload(c): c for c in findings.cells if c.resolved.measure.nccl != "none"}
    for cell in findings.cells:
        source = logged.get(_workload(cell))
        read = [] if source is None else _audits_of(findings, source)
        yield cell, source, next((audit for audit in read if isinstance(audit, Audit)), None)


def _workload(cell: Cell) -> str:
    """Everything but what is measured and for how long."""
    resolved = cell.resolved
    train = resolved.train.model_copy(update={"steps": 1})
    measure = resolved.measure.model_copy(update={"nccl": "none", "counts": False})
    same = resolved.model_copy(update={"train": train, "measure": measure})
    return f"{cell.arm or ''} {same.canonical_json()}"


def _audits_of(findings: Findings, cell: Cell) -> list[Audit | str]:
    runs = findings.store.root / "runs"
    return [_audited(runs / run.record.run_id) for run in cell.runs]


@lru_cache(maxsize=64)
def _audited(run: Path) -> Audit | str:
    """Once per report, as table, headline and section ask for the same; or why there is none."""
    try:
        return audit_run(run)
    except NothingMeasuredError as error:
        return str(error)


def nccl_section(findings: Findings) -> Iterator[Block]:
    """One part per cell with an evidence run; nothing where no cell has one."""
    cells = [cell for cell in findings.cells if cell.resolved.measure.nccl == "evidence"]
    if cells:
        yield note(
            "Evidence runs are short, log every collective and are not compared in time. A verdict "
            "is what NCCL's own lines prove; where none tells, it is NO_EVIDENCE."
        )
    for cell in cells:
        yield Heading(cell.name)
        for audit in _audits_of(findings, cell):
            if isinstance(audit, str):
                yield Paragraph(audit[0].upper() + audit[1:] + ".")
            else:
                yield from _of_audit(audit)


def _of_audit(audit: Audit) -> Iterator[Block]:
    if audit.rows:
        table = rows_table(audit)
        yield TableBlock(bytes_table(audit))
        yield TableBlock(Table(table.columns, table.rows[:_MOST_ROWS]))
    else:
        yield warning("No line of the logs tells which kernel ran.")
    if (reasons := reason_lines(audit)).items:
        yield Bullets(reasons.items)
        quotes = "\n".join(text for below in reasons.below for text in below)
        yield Details("Lines that prove it, and what is missing", quotes)
    yield Details("What was read", "\n".join(reading_facts(audit)))


def gradient_sums_section(findings: Findings) -> Iterator[Block]:
    """Nothing where no finished cell sends gradients in 16 bits through NCCL."""
    rows = []
    for cell, _, audit in audits(findings):
        if cell.finished:
            version = cell.finished[0].record.runtime.get("nccl")
            known = version if isinstance(version, str) else None
            logged = [] if audit is None else expectations.steady_rows(audit)
            rows += [
                (cell.name, str(version or "unknown"), s.axis, s.text, s.sent, s.summed, s.why)
                for s in expectations.gradient_sums(cell.resolved, known, logged)
            ]
    if rows:
        yield Paragraph(
            "NCCL adds up gradients that travel in 16 bits in FP32 only in symmetric kernels: "
            "within one NVLink domain from 2.27.3 on, reduce-scatter over several nodes from "
            "2.29.7 on, all-reduce over several nodes never. Unknown is an answer."
        )
        titles = "cell | NCCL | axis | reduction | sent as | summed in | why"
        yield TableBlock(Table.of(titles, rows, left=7))
