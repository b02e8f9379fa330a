"""Memory by category, stacked, beside the resident set of the largest rank."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes

from bench.derive.metrics import ALLOCATOR_PEAK, RSS
from reports.plots.style import GREY, MIB, category_look, drawing, in_order, svg, wrapped
from reports.views.cells import Cell

MOST_CELLS = 48


def memory_figure(cells: Sequence[Cell]) -> str:
    """Left: the ledger of rank 0 by category. Right: allocator's peak if known, else RSS peak.

    Categories are those of the moment with the most bytes; where no ledger was followed, the bar
    ends with "at most". The first `MOST_CELLS` cells are drawn.
    """
    shown = [cell for cell in cells if cell.finished][:MOST_CELLS]
    has_ledger = any(cell.ledger for cell in shown)
    with drawing(11.0, 1.5 + 0.27 * len(shown)) as figure:
        ratios = (2.0, 1.0) if has_ledger else (1.0,)
        grid = figure.subplots(1, len(ratios), sharey=True, squeeze=False, width_ratios=ratios)
        columns = grid[0]
        if has_ledger:
            _ledger(columns[0], shown)
            legend = columns[0].get_legend_handles_labels()
            figure.legend(*legend, loc="outside upper left", ncols=6, fontsize=8)
        _peak(columns[-1], shown)
        names = [wrapped(cell.name) for cell in shown]
        columns[0].set_yticks(range(len(shown)), names, fontsize=8)
        columns[0].invert_yaxis()
        return svg(figure, "memory")


def _ledger(axes: Axes, cells: Sequence[Cell]) -> None:
    categories = in_order(name for cell in cells for name in cell.ledger)
    ends = [0.0] * len(cells)
    for category in categories:
        widths = [cell.ledger.get(category, 0) / MIB for cell in cells]
        if any(widths):
            look = category_look(category, categories)
            axes.barh(range(len(cells)), widths, left=ends, height=0.72, linewidth=0.4, **look)
            ends = [end + width for end, width in zip(ends, widths, strict=True)]
    for row, (cell, end) in enumerate(zip(cells, ends, strict=True)):
        if not cell.ledger:
            axes.text(0, row, " no ledger", va="center", color=GREY, fontsize=8)
        elif not cell.ledger_is_measured:
            axes.text(end, row, " at most", va="center", color=GREY, fontsize=7)
    axes.set_xlabel("ledger of rank 0 (MiB)")
    axes.grid(visible=False, axis="y")


def _peak(axes: Axes, cells: Sequence[Cell]) -> None:
    allocated = any(cell.value(ALLOCATOR_PEAK) is not None for cell in cells)
    metric = ALLOCATOR_PEAK if allocated else RSS
    values = [(cell.value(metric) or 0.0) / MIB for cell in cells]
    bars = axes.barh(range(len(cells)), values, height=0.72, color="#a9b1bb")
    axes.bar_label(bars, [f" {value:,.0f}" if value else "" for value in values], fontsize=7.5)
    axes.set_xlim(0, 1.18 * max(values, default=1.0) or 1.0)
    axes.set_xlabel(f"{metric.title}, largest rank (MiB)")
    axes.grid(visible=False, axis="y")
