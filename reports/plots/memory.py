"""Memory by category, stacked, beside the resident set of the largest rank."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes

from bench.derive.metrics import ALLOCATOR_PEAK, RSS
from reports.plots.style import GREY, category_look, drawing, in_order, label, svg, wrapped
from reports.views.cells import Cell

_MIB = 2**20
MOST_CELLS = 48


def memory_figure(cells: Sequence[Cell]) -> str:
    """Left: the ledger of rank 0 by category. Right: allocator's peak if known, else RSS peak.

    Categories are those of the moment with the most bytes; where no ledger was followed, the bar
    ends with "at most". The first `MOST_CELLS` cells are drawn.
    """
    shown = [cell for cell in cells if cell.finished][:MOST_CELLS]
    names = [wrapped(cell.name) for cell in shown]
    has_ledger = any(cell.ledger for cell in shown)
    with drawing(11.0, 1.5 + 0.27 * len(shown)) as figure:
        if has_ledger:
            left, right = figure.subplots(1, 2, sharey=True, width_ratios=(2.0, 1.0))
            _ledger(left, shown)
            figure.legend(
                *left.get_legend_handles_labels(), loc="outside upper left", ncols=6, fontsize=8
            )
        else:
            right = figure.subplots(1, 1)
        _peak(right, shown)
        first = left if has_ledger else right
        first.set_yticks(range(len(shown)), names, fontsize=8)
        first.invert_yaxis()
        return svg(figure, "memory")


def _ledger(axes: Axes, cells: Sequence[Cell]) -> None:
    categories = in_order(name for cell in cells for name in cell.ledger)
    starts = [0.0] * len(cells)
    for category in categories:
        widths = [cell.ledger.get(category, 0) / _MIB for cell in cells]
        if any(widths):
            colour, hatch = category_look(category, categories)
            axes.barh(
                range(len(cells)),
                widths,
                left=starts,
                height=0.72,
                color=colour,
                hatch=hatch,
                edgecolor="white",
                linewidth=0.4,
                label=label(category.replace("_", " ")),
            )
            starts = [start + width for start, width in zip(starts, widths, strict=True)]
    for position, cell in enumerate(cells):
        if not cell.ledger:
            axes.text(0, position, " no ledger", va="center", color=GREY, fontsize=8)
        elif not cell.ledger_is_measured:
            end = sum(cell.ledger.values()) / _MIB
            axes.text(end, position, " at most", va="center", color=GREY, fontsize=7)
    axes.set_xlabel("ledger of rank 0 (MiB)")
    axes.grid(visible=False, axis="y")


def _peak(axes: Axes, cells: Sequence[Cell]) -> None:
    allocated = any(cell.value(ALLOCATOR_PEAK) is not None for cell in cells)
    metric = ALLOCATOR_PEAK if allocated else RSS
    values = [(cell.value(metric) or 0.0) / _MIB for cell in cells]
    axes.barh(range(len(cells)), values, height=0.72, color="#a9b1bb")
    for position, value in enumerate(values):
        if value:
            axes.text(value, position, f" {value:,.0f}", va="center", fontsize=7.5)
    axes.set_xlim(0, 1.18 * max(values, default=1.0) or 1.0)
    axes.set_xlabel(f"{metric.title}, largest rank (MiB)")
    axes.grid(visible=False, axis="y")
