"""Time of every step, one small panel per cell, with the steps that do not count shaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isfinite
from statistics import median

from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import LogLocator, NullLocator, ScalarFormatter

from bench.derive.summary import common_steps, step_milliseconds
from reports.plots.style import Look, drawing, svg, whole_steps, wrapped
from reports.views.cells import Cell, Run

#: (columns, characters of a title line): as many columns as leave room for the names.
_GRIDS = ((4, 36), (3, 50), (2, 78))
_WIDTH_INCHES = 11.0
_PANEL_INCHES = 1.62
_TITLE_LINE_INCHES = 0.13
_TOP_INCHES = 0.55
_BOTTOM_INCHES = 0.5
_SHADE = "#dfe3e8"
MOST_CELLS = 24
#: Medians of cells further apart than this share a logarithmic scale.
LINEAR_UP_TO = 4.0


def step_time_figure(cells: Sequence[Cell], look_of: Mapping[str, Look]) -> str:
    """Panels on one scale, so that heights compare; steps above the scale are marked at its top.

    The scale is logarithmic where the slowest cell would flatten all others on a linear one. The
    first run of each of the first `MOST_CELLS` cells is drawn.
    """
    shown = [(cell, cell.finished[0]) for cell in cells if cell.finished][:MOST_CELLS]
    times = [step_milliseconds(common_steps(run.record.steps)) for _, run in shown]
    top = _top(shown, times)
    bottom = _bottom(times)
    most, width = _grid([cell.name for cell, _ in shown])
    titles = [wrapped(cell.name, width) for cell, _ in shown]
    lines = max((title.count("\n") + 1 for title in titles), default=1)
    rows = -(-len(shown) // most)
    panel = _PANEL_INCHES + _TITLE_LINE_INCHES * lines
    height = _TOP_INCHES + _BOTTOM_INCHES + panel * rows
    # Placed by hand: constrained layout gives up on many small panels.
    with drawing(_WIDTH_INCHES, height, arranged=False) as figure:
        grid = figure.subplots(rows, min(most, len(shown)), squeeze=False, sharey=True)
        figure.subplots_adjust(
            left=0.062,
            right=0.99,
            top=1 - _TOP_INCHES / height,
            bottom=_BOTTOM_INCHES / height,
            wspace=0.09,
            hspace=0.32 + 0.1 * lines,
        )
        panels = grid.flatten()
        for axes, (cell, run), values, title in zip(panels, shown, times, titles, strict=False):
            _panel(axes, run, values, top, look_of[cell.name])
            _scale(axes, bottom, top)
            axes.set_title(title, loc="left", fontsize=8, pad=3)
        for axes in panels[len(shown) :]:
            axes.set_axis_off()
        figure.supxlabel("step", fontsize=9, y=0.12 / height)
        figure.supylabel("step time (ms, slowest rank)", fontsize=9, x=0.005)
        figure.legend(
            handles=_legend(),
            loc="upper left",
            bbox_to_anchor=(0.055, 1 - 0.02 / height),
            ncols=4,
            fontsize=8,
            borderaxespad=0.0,
        )
        return svg(figure, "step-time")


def _grid(names: Sequence[str]) -> tuple[int, int]:
    """Columns of panels, and characters of a line of their titles."""
    longest = max(map(len, names), default=0)
    return next((grid for grid in _GRIDS if longest <= grid[1]), _GRIDS[-1])


def _bottom(times: Sequence[list[float]]) -> float:
    """Lower end of the scale: 0 on a linear one, above it on a logarithmic one."""
    medians = [median(values) for values in times if values]
    lowest = min((value for values in times for value in values), default=0.0)
    usable = lowest > 0 and all(isfinite(value) for value in [lowest, *medians])
    if not usable or max(medians) / min(medians) <= LINEAR_UP_TO:
        return 0.0
    return 0.8 * lowest


def _scale(axes: Axes, bottom: float, top: float) -> None:
    if bottom > 0:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(ScalarFormatter())
        axes.yaxis.set_minor_locator(NullLocator())
    axes.set_ylim(bottom, top)


def _top(shown: Sequence[tuple[Cell, Run]], times: Sequence[list[float]]) -> float:
    """Upper end of the scale: all that counts fits, single outliers need not."""
    highest = 0.0
    for (_, run), values in zip(shown, times, strict=True):
        steady = run.summary.steady
        counted = values[steady.first - 1 : steady.last] if steady and steady.first else values
        ordered = sorted(filter(isfinite, counted or values))
        if ordered:
            highest = max(highest, ordered[int(0.9 * (len(ordered) - 1))], 1.6 * median(ordered))
    return 1.15 * highest or 1.0


def _panel(axes: Axes, run: Run, values: Sequence[float], top: float, look: Look) -> None:
    steps = range(1, len(values) + 1)
    steady = run.summary.steady
    if steady is not None and steady.stable:
        axes.axvspan(0.5, steady.first - 0.5, color=_SHADE, linewidth=0)
        window = values[steady.first - 1 : steady.last]
        if window:
            axes.hlines(median(window), steady.first, steady.last, color=look.colour, linewidth=1.4)
    else:
        axes.axvspan(0.5, len(values) + 0.5, color=_SHADE, linewidth=0)
    axes.plot(steps, [min(v, top) for v in values], color="#b4bac2", linewidth=0.8, zorder=1.5)
    inside = [(s, v) for s, v in zip(steps, values, strict=True) if v <= top]
    axes.plot([s for s, _ in inside], [v for _, v in inside], ".", color=look.colour, markersize=4)
    outside = [s for s, v in zip(steps, values, strict=True) if v > top]
    axes.plot(
        outside, [top * 0.985] * len(outside), "^", color=look.colour, markersize=4, clip_on=False
    )
    axes.set_xlim(0.5, max(len(values), 1) + 0.5)
    whole_steps(axes, 5)
    axes.tick_params(labelsize=7.5)


def _legend() -> list[Patch | Line2D]:
    return [
        Patch(color=_SHADE, label="not counted (warm-up; all of it: not steady)"),
        Line2D([], [], color="black", linewidth=1.4, label="median of the steady window"),
        Line2D([], [], color="black", marker=".", linestyle="", label="step"),
        Line2D([], [], color="black", marker="^", linestyle="", markersize=4, label="above scale"),
    ]
