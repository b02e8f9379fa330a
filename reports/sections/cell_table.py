"""The table of cells with their numbers, and the time of every step."""

from __future__ import annotations

from reports.comparisons.change import MEMORY_TITLES, MemoryMetric, memory_bytes
from reports.findings import Findings
from reports.plots.step_time import MOST_CELLS, step_time_figure
from reports.renderers import quantity
from reports.renderers.document import Block, Figure, Paragraph, Section, TableBlock
from reports.renderers.table import Row, RowKind, Table, columns
from reports.views.cells import Cell


def cells_section(findings: Findings) -> Section:
    """Every cell with a finished run."""
    if not findings.finished:
        return Section("cells", "Cells", (Paragraph("No cell has a finished run."),))
    blocks: list[Block] = [
        TableBlock(cell_table(findings)),
        Paragraph(
            "Step time, tokens/s and TFLOP/s are medians over the steady steps of a run, and over "
            "runs where a cell has several; nine of ten steady steps stay within p90. A step takes "
            "as long as its slowest rank. Tokens/s and "
            "bytes sent are sums over ranks; TFLOP/s is per device, which on a CPU is a rank. "
            "Memory is that of the largest rank, the ledger that of rank 0.",
            tone="note",
        ),
    ]
    unsteady = [cell.name for cell in findings.finished if not cell.n]
    if unsteady:
        blocks.append(
            Paragraph(f"Without a time (see Not measured): {', '.join(unsteady)}.", tone="warning")
        )
    caption = (
        "Time of every step, first run of each cell, all panels on one scale; the scale is "
        "logarithmic where the slowest cell would flatten the others."
    )
    if len(findings.finished) > MOST_CELLS:
        caption += f" The first {MOST_CELLS} of {len(findings.finished)} cells are shown."
    svg = step_time_figure(findings.finished, findings.looks)
    blocks.append(Figure("step-times", svg, caption))
    return Section("cells", "Cells", tuple(blocks))


def cell_table(findings: Findings) -> Table:
    """One row per finished cell, references set off."""
    metrics: list[MemoryMetric] = [
        metric
        for metric in MEMORY_TITLES
        if any(memory_bytes(cell, metric) is not None for cell in findings.finished)
    ]
    titles = columns(
        "cell",
        "engine",
        "strategy",
        "dtypes",
        "n",
        "step (ms)",
        "p90 (ms)",
        "tokens/s",
        "TFLOP/s per device",
        "MFU",
        "final loss",
        "grad norm",
        *(MEMORY_TITLES[metric] for metric in metrics),
        "sent per step",
        left=4,
    )
    return Table(titles, tuple(_row(cell, metrics, findings) for cell in findings.finished))


def _row(cell: Cell, metrics: list[MemoryMetric], findings: Findings) -> Row:
    engine = cell.resolved.engine
    plain: RowKind = "plain" if cell.n else "unsteady"
    kind: RowKind = "reference" if findings.is_reference(cell) else plain
    texts = (
        cell.name,
        engine.name,
        engine.strategy or quantity.MISSING,
        cell.dtypes,
        str(cell.n),
        quantity.significant(cell.value("step_milliseconds_median")),
        quantity.significant(cell.value("step_milliseconds_p90")),
        quantity.significant(cell.value("tokens_per_second")),
        quantity.significant(cell.value("tflops_per_second_per_device")),
        _mfu(cell),
        quantity.loss(cell.value("final_loss")),
        quantity.significant(cell.value("final_grad_norm")),
        *(quantity.binary_bytes(memory_bytes(cell, metric)) for metric in metrics),
        quantity.binary_bytes(cell.value("wire_bytes_per_step")),
    )
    return Row(texts, kind)


def _mfu(cell: Cell) -> str:
    """MFU, or in words why there is none."""
    mfu = cell.value("mfu")
    if mfu is not None:
        return quantity.share(mfu)
    if not cell.n:
        return quantity.MISSING
    notes = [note for run in cell.measured for note in run.summary.notes]
    if any("invalid" in note for note in notes):
        return "invalid"
    if any("no bf16 peak" in note or "peak known" in note for note in notes):
        return "no peak for dtype"
    return "unknown device"
