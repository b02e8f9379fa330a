"""Cells that gave no number, each with its class and reason; nothing is left out silently."""

from __future__ import annotations

from collections.abc import Iterator

from reports.findings import Findings
from reports.renderers import quantity
from reports.renderers.document import Block, Bullets, Heading, Paragraph, TableBlock, note
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


def unmeasured(findings: Findings) -> Iterator[Block]:
    """Failed, damaged, unsteady and running runs; pruned, merged and missing cells; damage."""
    runs = [(cell, run) for cell in findings.cells for run in cell.runs if run.kind != "measured"]
    pruned = [cell for sweep in findings.sweeps for cell in sweep.pruned]
    left_out = tuple(_left_out(findings))
    problems = dict.fromkeys(text for sweep in findings.sweeps for text in sweep.problems)
    if runs:
        yield Heading("Runs without a time")
        titles = "cell | class | state | reason | run | steps | rank"
        yield TableBlock(Table.of(titles, (_row(*run) for run in runs), left=5))
        kinds = dict.fromkeys(run.kind for _, run in runs)
        meanings = "; ".join(f"{kind}: {_MEANING[kind]}" for kind in kinds)
        yield note(meanings[0].upper() + meanings[1:] + ".")
    if pruned:
        yield Heading("Pruned when planned")
        rows = ((cell.id, cell.rule, cell.reason) for cell in pruned)
        yield TableBlock(Table.of("cell | rule | reason", rows, left=3))
    if left_out:
        yield Heading("Left out or missing")
        yield Bullets(left_out)
    if problems:
        yield Heading("Damaged files")
        yield Bullets(tuple(("", text) for text in problems))
    if not (runs or pruned or left_out or problems):
        yield Paragraph("Every planned cell was measured.")


def _row(cell: Cell, run: Run) -> Row:
    record, status = run.record, run.record.status
    steps = min((len(samples) for samples in record.steps.values()), default=0)
    rank = quantity.MISSING if status.failed_rank is None else str(status.failed_rank)
    of_all = f"{steps} of {record.resolved.train.steps}"
    texts = (cell.name, run.kind, status.state, why_no_time(run), record.run_id, of_all, rank)
    return Row(texts, "unsteady" if run.kind in ("unsteady", "stopped", "running") else "bad")


def _left_out(findings: Findings) -> Iterator[tuple[str, str]]:
    for sweep in findings.sweeps:
        yield from ((name, "planned, but has no run yet") for name in sweep.not_run)
        yield from ((n, f"the same run as {other}, listed there") for n, other in sweep.merged)
        if sweep.stale:
            runs = quantity.counted(sweep.stale, "run")
            yield sweep.id, f"{runs} of configurations no longer planned, left out"
    for cell in findings.cells:
        if cell.superseded:
            runs = quantity.counted(cell.superseded, "older run")
            yield cell.name, f"{runs} left out (other code, retried)"
