"""What runs measured besides the times of steps: counts of one, exposed communication."""

from __future__ import annotations

from collections.abc import Iterable

from bench.derive.counts import step_counts
from bench.derive.metrics import COUNTS
from reports.findings import Findings
from reports.renderers import quantity
from reports.renderers.document import Section, TableBlock
from reports.renderers.table import Table
from reports.views.cells import Cell
from reports.views.machine import entries


def counts_section(findings: Findings) -> Section | None:
    """What a step does; a metric that is zero everywhere is left out."""
    cells = [cell for cell in findings.finished if cell.value(COUNTS[0]) is not None]
    shown = [metric for metric in COUNTS if any(cell.value(metric) for cell in cells)]
    rows = (
        (
            cell.name,
            *(quantity.amount(cell.value(metric), metric.unit) for metric in shown),
            quantity.significant(_calls_per_unit(cell)),
        )
        for cell in cells
    )
    return _section(
        ("counts", "What a step does"),
        ("cell", *(metric.title for metric in shown), "Python calls per unit and rank"),
        rows,
        "One step, counted behind the last timed one, over all ranks. The harness's own Python "
        "calls (loop, data, its models) are left out.",
    )


def communication_section(findings: Findings) -> Section | None:
    """How much of the communication of a profiled run nothing was computed beside."""
    return _section(
        ("communication", "Exposed communication"),
        "cell | operation | intervals | ms | exposed ms | exposed",
        (row for cell in findings.finished for row in _traced(cell)),
        "From rank 0's trace of three steps. Exposed: nothing was computed on the device meanwhile "
        "(on a CPU: by torch, on the thread that trains). A profiled run is slower than others.",
    )


def _section(
    name: tuple[str, str],
    titles: str | tuple[str, ...],
    rows: Iterable[tuple[str, ...]],
    caption: str,
) -> Section | None:
    """One table under an anchor and a title; None without a row."""
    table = Table.of(titles, rows)
    return Section(*name, (TableBlock(table, caption),)) if table.rows else None


def _calls_per_unit(cell: Cell) -> float | None:
    for run in cell.finished:
        counts = step_counts(run.record)
        if counts is not None:
            return run.summary.counts["python_calls"] / (counts.units * counts.ranks)
    return None


def _traced(cell: Cell) -> list[tuple[str, ...]]:
    """Operations in the trace of the last run that has any."""
    for run in reversed(cell.finished):
        found = entries(run.record.runtime, "communication")
        if not found:
            continue
        rows: list[tuple[str, ...]] = []
        for operation in found:
            seen = entries(found, operation)
            taken, exposed = float(seen["milliseconds"]), float(seen["exposed_milliseconds"])
            share = f"{100 * exposed / taken:.0f} %" if taken else "none"
            times = quantity.significant(taken), quantity.significant(exposed)
            rows.append((cell.name, operation, str(seen["count"]), *times, share))
        return rows
    return []
