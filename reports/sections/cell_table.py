"""The table of cells with their numbers, and the time of every step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from bench.derive.metrics import LEDGER_PEAK, MEMORY_PEAKS, METRICS, Metric
from reports.findings import Findings
from reports.plots.step_time import MOST_CELLS, step_time_figure
from reports.plots.style import looks
from reports.renderers import quantity
from reports.renderers.document import Block, Figure, Paragraph, folded_blocks, note
from reports.renderers.table import Row, Table
from reports.sections.nccl import proofs
from reports.views.cells import Cell

_BEST = "Bold: the best of its column among cells with a time."


def cells_section(findings: Findings) -> Iterator[Block]:
    """Every cell with a finished run."""
    finished = findings.finished
    if not finished:
        yield Paragraph("No cell has a finished run.")
        return
    table = cell_table(findings)
    yield from folded_blocks(table, "cell", _BEST if any(row.best for row in table.rows) else "")
    yield note(
        "Step time, tokens/s and TFLOP/s are medians over the steady steps of a run, and over "
        "runs where a cell has several; nine of ten steady steps stay within p90. A step takes "
        "as long as its slowest rank. Tokens/s and "
        "bytes sent are sums over ranks; TFLOP/s is per device, which on a CPU is a rank. "
        "Memory is that of the largest rank, the ledger that of rank 0."
    )
    bounds = [cell for cell in finished if cell.ledger and not cell.ledger_is_measured]
    if at_most := dict.fromkeys(cell.resolved.engine.name for cell in bounds):
        yield note(
            "Ledger peaks are what rank 0 held at one moment of a step. Where no ledger was "
            "followed through a step, they are an upper bound (<=), the sum of what each category "
            f"holds at most: {', '.join(at_most)}. Changes compare no bound with a peak."
        )
    if timeless := [cell.name for cell in findings.without_a_time]:
        yield note(
            f"Without a time, for the reason under Not measured: {', '.join(timeless)}. Losses, "
            "memory and bytes count."
        )
    caption = (
        "Time of every step, first run of each cell, all panels on one scale; the scale is "
        "logarithmic where the slowest cell would flatten the others."
    )
    caption += quantity.first_of(MOST_CELLS, len(finished))
    yield Figure("step-times", step_time_figure(finished, looks(findings.cells)), caption)


def cell_table(findings: Findings) -> Table:
    """One row per finished cell, references set off; memory that no cell has is left out."""
    cells = findings.finished
    metrics = [
        metric
        for metric in METRICS
        if metric.column
        and (metric not in MEMORY_PEAKS or any(cell.value(metric) is not None for cell in cells))
    ]
    proved = {name: proof.text for name, proof in proofs(findings).items()}
    kernels = ("NCCL kernels by log",) if proved else ()
    names = ("cell", "engine", "strategy", "dtypes", *kernels, "n")
    best = [best_cells(cells, metric) for metric in metrics]
    rows = (
        replace(
            _row(cell, metrics, findings, proved),
            best=frozenset(at for at, of in enumerate(best, len(names)) if place in of),
        )
        for place, cell in enumerate(cells)
    )
    titles = (*names, *(metric.title for metric in metrics))
    return Table.of(titles, rows, left=len(names) - 1)


def best_cells(cells: Sequence[Cell], metric: Metric) -> list[int]:
    """Indices of the measured cells whose number nobody beats; none where all are equal.

    Only of metrics with a better direction: a loss is not better for being lower. Nor is a bound
    better than a peak that was measured.
    """
    is_mixed = len({cell.ledger_is_measured for cell in cells if cell.ledger}) > 1
    direction = "both" if metric.rule is None else metric.rule.direction
    if direction == "both" or (metric is LEDGER_PEAK and is_mixed):
        return []
    measured = {at: cell.value(metric) for at, cell in enumerate(cells) if cell.n}
    values = {at: value for at, value in measured.items() if value is not None}
    if len(set(values.values())) <= 1:
        return []
    target = (min if direction == "lower_is_better" else max)(values.values())
    return [at for at, value in values.items() if value == target]


def _row(cell: Cell, metrics: list[Metric], findings: Findings, proved: Mapping[str, str]) -> Row:
    engine = cell.resolved.engine
    texts = (
        cell.name,
        engine.name,
        engine.strategy or quantity.MISSING,
        cell.dtypes + cell.residual_stream,
        *((proved.get(cell.name, quantity.MISSING),) if proved else ()),
        str(cell.n),
        *(_number(cell, metric) for metric in metrics),
    )
    if findings.is_reference(cell):
        return Row(texts, "reference")
    return Row(texts, "plain" if cell.n else "unsteady")


def _number(cell: Cell, metric: Metric) -> str:
    """The cell's number, or in words why there is none."""
    if cell.value(metric) is None and cell.n:
        reasons = (metric.missing(run.summary) for run in cell.measured)
        return next(filter(None, reasons), quantity.MISSING)
    return cell.text(metric)
