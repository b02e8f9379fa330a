"""What a step does, cell by cell, of runs that counted it."""

from __future__ import annotations

from bench.derive.counts import step_counts
from bench.derive.metrics import COUNTS
from reports.findings import Findings
from reports.renderers import quantity
from reports.renderers.document import Section, TableBlock
from reports.renderers.table import Table
from reports.views.cells import Cell

_CAPTION = (
    "One step, counted behind the last timed one, over all ranks. The harness's own Python calls "
    "(loop, data, its models) are left out."
)


def counts_section(findings: Findings) -> Section | None:
    """None where no run counted; a metric that is zero everywhere is left out."""
    cells = [cell for cell in findings.finished if cell.value(COUNTS[0]) is not None]
    shown = [metric for metric in COUNTS if any(cell.value(metric) for cell in cells)]
    if not cells:
        return None
    rows = (
        (
            cell.name,
            *(quantity.amount(cell.value(metric), metric.unit) for metric in shown),
            quantity.significant(_calls_per_unit(cell)),
        )
        for cell in cells
    )
    titles = ("cell", *(metric.title for metric in shown), "Python calls per unit and rank")
    return Section("counts", "What a step does", (TableBlock(Table.of(titles, rows), _CAPTION),))


def _calls_per_unit(cell: Cell) -> float | None:
    for run in cell.finished:
        counts = step_counts(run.record)
        if counts is not None:
            return run.summary.counts["python_calls"] / (counts.units * counts.ranks)
    return None
