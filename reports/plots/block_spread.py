"""Run medians of both arms of a cell, block by block: slow launches, drift and throttling show."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from matplotlib.axes import Axes

from bench.derive.metrics import STEP_TIME
from reports.gates.pairing import Pair
from reports.plots.style import BLUE, GREY, VERMILLION, drawing, label, svg, whole_steps

_COLUMNS = 3
_COLOURS = (BLUE, VERMILLION)
_PANEL_INCHES = 2.3
MOST_CELLS = 24
_FEWEST_BLOCKS = 2


def block_spread_figure(name: str, pairs: Sequence[Pair], arms: tuple[str, str]) -> str | None:
    """A panel per cell, of the first `MOST_CELLS`; None where no cell has two blocks.

    Left in each panel: the run medians by block, against the median of base. Right, at the edge:
    the same as a strip, in which two modes are two heaps. arms: what base and head are called.
    """
    shown = [pair for pair in pairs if len(_blocks(pair)) >= _FEWEST_BLOCKS][:MOST_CELLS]
    if not shown:
        return None
    columns = min(_COLUMNS, len(shown))
    rows = -(-len(shown) // columns)
    with drawing(11.0, _PANEL_INCHES * rows + 0.5) as figure:
        grid = figure.subplots(rows, columns, squeeze=False).flatten()
        for axes, pair in zip(grid, shown, strict=False):
            _panel(axes, pair, arms)
        for axes in grid[len(shown) :]:
            axes.set_axis_off()
        handles, names = grid[0].get_legend_handles_labels()
        figure.legend(handles, names, loc="outside upper left", ncols=2)
        return svg(figure, name)


def _blocks(pair: Pair) -> list[int]:
    return sorted(set(pair.base.of(STEP_TIME)) & set(pair.head.of(STEP_TIME)))


def _panel(axes: Axes, pair: Pair, arms: tuple[str, str]) -> None:
    blocks = _blocks(pair)
    middle = median(pair.base.of(STEP_TIME)[block] for block in blocks)
    strip = blocks[-1] + 1 + 0.08 * (blocks[-1] + 1 - blocks[0])
    sides = ((pair.base, arms[0], "o"), (pair.head, arms[1], "D"))
    for index, (side, name, marker) in enumerate(sides):
        values = [100 * (side.of(STEP_TIME)[block] / middle - 1) for block in blocks]
        colour = _COLOURS[index]
        axes.plot(
            blocks, values, marker=marker, color=colour, linewidth=0.8, markersize=3.5, label=name
        )
        place = strip * (1 + 0.03 * index)
        axes.plot([place] * len(values), values, "_", color=colour, markersize=7, alpha=0.7)
    axes.axhline(0.0, color=GREY, linewidth=0.8)
    axes.set_title(label(pair.label, 36), loc="left", fontsize=8.5)
    axes.set_xlabel("block", fontsize=8)
    axes.set_ylabel("run median (%)", fontsize=8)
    axes.tick_params(labelsize=7.5)
    whole_steps(axes, 5)
