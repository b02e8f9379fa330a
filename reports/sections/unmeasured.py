"""Cells that gave no number, each with its class and reason; nothing is left out silently."""

from __future__ import annotations

from reports.findings import Findings
from reports.renderers import quantity
from reports.renderers.document import Block, Bullets, Heading, Paragraph, Section, TableBlock
from reports.renderers.table import Row, Table
from reports.views.cells import Cell, Run
from reports.views.no_number import why_no_time

_MEANING = {
    "failed": "the run ended without finishing",
    "stopped": "the run was ended from outside, and the same command runs it again",
    "damaged": "a file of the record is damaged or missing; none of its numbers is used",
    "unsteady": "finished, but has no time that could stand for it",
    "running": "still running when the report was written",
}


def unmeasured(findings: Findings) -> Section:
    """Failed, damaged, unsteady and running runs; pruned, merged and missing cells; damage."""
    blocks: list[Block] = [*_runs(findings), *_pruned(findings), *_others(findings)]
    if not blocks:
        blocks = [Paragraph("Every planned cell was measured.")]
    return Section("not-measured", "Not measured", tuple(blocks))


def _runs(findings: Findings) -> list[Block]:
    rows = []
    kinds: dict[str, None] = {}
    for cell in findings.cells:
        for run in cell.runs:
            if run.kind != "measured":
                kinds[run.kind] = None
                rows.append(_run_row(cell, run))
    if not rows:
        return []
    meanings = "; ".join(f"{kind}: {_MEANING[kind]}" for kind in kinds)
    return [
        Heading("Runs without a time"),
        TableBlock(Table.of("cell | class | state | reason | run | steps | rank", rows, left=5)),
        Paragraph(meanings[0].upper() + meanings[1:] + ".", tone="note"),
    ]


def _run_row(cell: Cell, run: Run) -> Row:
    record = run.record
    status = record.status
    steps = min((len(samples) for samples in record.steps.values()), default=0)
    rank = quantity.MISSING if status.failed_rank is None else str(status.failed_rank)
    texts = (
        cell.name,
        run.kind,
        status.state,
        why_no_time(run),
        record.run_id,
        f"{steps} of {record.resolved.train.steps}",
        rank,
    )
    return Row(texts, "unsteady" if run.kind in ("unsteady", "stopped", "running") else "bad")


def _pruned(findings: Findings) -> list[Block]:
    pruned = [cell for sweep in findings.sweeps for cell in sweep.pruned]
    if not pruned:
        return []
    rows = ((cell.id, cell.rule, cell.reason) for cell in pruned)
    table = Table.of("cell | rule | reason", rows, left=3)
    return [Heading("Pruned when planned"), TableBlock(table)]


def _others(findings: Findings) -> list[Block]:
    items: list[tuple[str, str]] = []
    for sweep in findings.sweeps:
        items += [(name, "planned, but has no run yet") for name in sweep.not_run]
        items += [(name, f"the same run as {other}, listed there") for name, other in sweep.merged]
        if sweep.stale:
            runs = quantity.counted(sweep.stale, "run")
            items.append((sweep.id, f"{runs} of configurations no longer planned, left out"))
    items += [
        (
            cell.name,
            f"{quantity.counted(cell.superseded, 'older run')} left out (other code, retried)",
        )
        for cell in findings.cells
        if cell.superseded
    ]
    problems = dict.fromkeys(text for sweep in findings.sweeps for text in sweep.problems)
    blocks: list[Block] = []
    if items:
        blocks += [Heading("Left out or missing"), Bullets(tuple(items))]
    if problems:
        blocks += [
            Heading("Damaged files"),
            Bullets(tuple(("", text) for text in problems)),
        ]
    return blocks
