"""The table of cells with their numbers, and the time of every step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from bench.derive.metrics import LEDGER_PEAK, MEMORY_PEAKS, METRICS, Metric
from reports.findings import Findings
from reports.plots.step_time import MOST_CELLS, step_time_figure
from reports.plots.style import looks
from reports.renderers import quantity
from reports.renderers.document import Block, Figure, Paragraph, Section, TableBlock
from reports.renderers.table import Row, RowKind, Table, folded
from reports.sections.nccl import proofs
from reports.views.cells import Cell

_BEST = "Bold: the best of its column among cells with a time."


def cells_section(findings: Findings) -> Section:
    """Every cell with a finished run."""
    if not findings.finished:
        return Section("cells", "Cells", (Paragraph("No cell has a finished run."),))
    table, constant = folded(cell_table(findings))
    blocks: list[Block] = []
    if constant:
        blocks.append(Paragraph(f"In every cell: {constant}."))
    blocks += [
        TableBlock(table, _BEST if any(row.best for row in table.rows) else ""),
        Paragraph(
            "Step time, tokens/s and TFLOP/s are medians over the steady steps of a run, and over "
            "runs where a cell has several; nine of ten steady steps stay within p90. A step takes "
            "as long as its slowest rank. Tokens/s and "
            "bytes sent are sums over ranks; TFLOP/s is per device, which on a CPU is a rank. "
            "Memory is that of the largest rank, the ledger that of rank 0.",
            tone="note",
        ),
    ]
    at_most = dict.fromkeys(
        cell.resolved.engine.name
        for cell in findings.finished
        if cell.ledger and not cell.ledger_is_measured
    )
    if at_most:
        text = (
            "Ledger peaks are what rank 0 held at one moment of a step. Where no ledger was "
            "followed through a step, they are an upper bound (<=), the sum of what each category "
            f"holds at most: {', '.join(at_most)}. Changes compare no bound with a peak."
        )
        blocks.append(Paragraph(text, tone="note"))
    unsteady = [cell.name for cell in findings.finished if not cell.n]
    if unsteady:
        text = (
            f"Without a time, for the reason under Not measured: {', '.join(unsteady)}. Losses, "
            "memory and bytes count."
        )
        blocks.append(Paragraph(text, tone="note"))
    caption = (
        "Time of every step, first run of each cell, all panels on one scale; the scale is "
        "logarithmic where the slowest cell would flatten the others."
    )
    if len(findings.finished) > MOST_CELLS:
        caption += f" The first {MOST_CELLS} of {len(findings.finished)} cells are shown."
    svg = step_time_figure(findings.finished, looks(findings.cells))
    blocks.append(Figure("step-times", svg, caption))
    return Section("cells", "Cells", tuple(blocks))


def cell_table(findings: Findings) -> Table:
    """One row per finished cell, references set off; memory that no cell has is left out."""
    metrics = [
        metric
        for metric in METRICS
        if metric.column
        and (
            metric not in MEMORY_PEAKS
            or any(cell.value(metric) is not None for cell in findings.finished)
        )
    ]
    proved = {name: proof.text for name, proof in proofs(findings).items()}
    kernels = ("NCCL kernels by log",) if proved else ()
    names = ("cell", "engine", "strategy", "dtypes", *kernels)
    titles = (*names, "n", *(metric.title for metric in metrics))
    rows = [_row(cell, metrics, findings, proved) for cell in findings.finished]
    first = len(titles) - len(metrics)
    best: dict[int, set[int]] = {}
    for column, metric in enumerate(metrics, start=first):
        for index in best_cells(findings.finished, metric):
            best.setdefault(index, set()).add(column)
    with_best = (replace(row, best=frozenset(best.get(at, ()))) for at, row in enumerate(rows))
    return Table.of(titles, with_best, left=len(names))


def best_cells(cells: Sequence[Cell], metric: Metric) -> list[int]:
    """Indices of the measured cells whose number nobody beats; none where all are equal.

    Only of metrics with a better direction: a loss is not better for being lower. Nor is a bound
    better than a peak that was measured.
    """
    kinds = {cell.ledger_is_measured for cell in cells if cell.ledger}
    if metric is LEDGER_PEAK and len(kinds) > 1:
        return []
    if metric.rule is None or metric.rule.direction == "both":
        return []
    values = {
        index: value
        for index, cell in enumerate(cells)
        if cell.n and (value := cell.value(metric)) is not None
    }
    if len(set(values.values())) <= 1:
        return []
    choose = min if metric.rule.direction == "lower_is_better" else max
    target = choose(values.values())
    return [index for index, value in values.items() if value == target]


def _row(cell: Cell, metrics: list[Metric], findings: Findings, proved: Mapping[str, str]) -> Row:
    engine = cell.resolved.engine
    plain: RowKind = "plain" if cell.n else "unsteady"
    kind: RowKind = "reference" if findings.is_reference(cell) else plain
    texts = (
        cell.name,
        engine.name,
        engine.strategy or quantity.MISSING,
        cell.dtypes + cell.residual_stream,
        *((proved.get(cell.name, quantity.MISSING),) if proved else ()),
        str(cell.n),
        *(_number(cell, metric) for metric in metrics),
    )
    return Row(texts, kind)


def _number(cell: Cell, metric: Metric) -> str:
    """The cell's number, or in words why there is none."""
    value = cell.value(metric)
    if value is None and cell.n:
        reasons = [text for run in cell.measured if (text := metric.missing(run.summary))]
        return reasons[0] if reasons else quantity.MISSING
    return cell.text(metric)
