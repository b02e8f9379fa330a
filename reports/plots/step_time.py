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
from reports.plots.style import Look, panels, svg, top_legend, whole_steps, wrapped
from reports.views.cells import Cell, Run

#: (columns, characters of a title line): as many columns as leave room for the names.
_GRIDS = ((4, 36), (3, 50), (2, 78))
_SHADE = "#dfe3e8"
MOST_CELLS = 24
#: Medians of cells further apart than this share a logarithmic scale.
LINEAR_UP_TO = 4.0


def step_time_figure(cells: Sequence[Cell], look_of: Mapping[str, Look]) -> str:
    """Panels on one scale, so that heights compare; steps above the scale are marked at its top.

    The scale is logarithmic where the slowest cell would flatten all others on a linear one. The
    first run of each of the first `MOST_CELLS` cells is drawn.
    """
    shown = [(cell.name, cell.finished[0]) for cell in cells if cell.finished][:MOST_CELLS]
    times = [step_milliseconds(common_steps(run.record.steps)) for _, run in shown]
    bottom, top = _scale([run for _, run in shown], times)
    longest = max((len(name) for name, _ in shown), default=0)
    columns, width = next((grid for grid in _GRIDS if longest <= grid[1]), _GRIDS[-1])
    titles = [wrapped(name, width) for name, _ in shown]
    lines = max((title.count("\n") + 1 for title in titles), default=1)
    labels = ("step", "step time (ms, slowest rank)")
    size = {"top": 0.55, "hspace": 0.32 + 0.1 * lines}
    with panels(len(shown), columns, 1.62 + 0.13 * lines, labels, **size) as (figure, grid):
        for axes, (name, run), values, title in zip(grid, shown, times, titles, strict=True):
            _panel(axes, run, values, top, look_of[name].colour)
            if bottom > 0:
                axes.set_yscale("log")
                axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
                axes.yaxis.set_major_formatter(ScalarFormatter())
                axes.yaxis.set_minor_locator(NullLocator())
            axes.set_ylim(bottom, top)
            axes.set_title(title, loc="left", fontsize=8, pad=3)
        handles = [
            Patch(color=_SHADE, label="not counted (warm-up; all of it: not steady)"),
            Line2D([], [], color="k", linewidth=1.4, label="median of the steady window"),
            Line2D([], [], color="k", marker=".", linestyle="", label="step"),
            Line2D([], [], color="k", marker="^", linestyle="", markersize=4, label="above scale"),
        ]
        top_legend(figure, handles, 4)
        return svg(figure, "step-time")


def _scale(runs: Sequence[Run], times: Sequence[list[float]]) -> tuple[float, float]:
    """Both ends: all that counts fits, single outliers need not; above 0 on a logarithmic scale."""
    highest = 0.0
    for run, values in zip(runs, times, strict=True):
        steady = run.summary.steady
        counted = values[steady.first - 1 : steady.last] if steady and steady.first else values
        ordered = sorted(filter(isfinite, counted or values))
        if ordered:
            highest = max(highest, ordered[int(0.9 * (len(ordered) - 1))], 1.6 * median(ordered))
    medians = [median(values) for values in times if values]
    lowest = min((value for values in times for value in values), default=0.0)
    usable = lowest > 0 and all(isfinite(value) for value in [lowest, *medians])
    is_logarithmic = usable and max(medians) / min(medians) > LINEAR_UP_TO
    return 0.8 * lowest if is_logarithmic else 0.0, 1.15 * highest or 1.0


def _panel(axes: Axes, run: Run, values: Sequence[float], top: float, colour: str) -> None:
    steady, last = run.summary.steady, len(values)
    is_stable = steady is not None and steady.stable
    shaded = steady.first - 1 if steady is not None and is_stable else last
    axes.axvspan(0.5, shaded + 0.5, color=_SHADE, linewidth=0)
    if steady is not None and is_stable and (window := values[shaded : steady.last]):
        axes.hlines(median(window), steady.first, steady.last, color=colour, linewidth=1.4)
    steps = range(1, last + 1)
    axes.plot(steps, [min(v, top) for v in values], color="#b4bac2", linewidth=0.8, zorder=1.5)
    inside = [(s, v) for s, v in zip(steps, values, strict=True) if v <= top]
    outside = [(s, top * 0.985) for s, v in zip(steps, values, strict=True) if v > top]
    for points, marker in ((inside, "."), (outside, "^")):
        xs, ys = [x for x, _ in points], [y for _, y in points]
        axes.plot(xs, ys, marker, color=colour, markersize=4, clip_on=marker == ".")
    axes.set_xlim(0.5, max(last, 1) + 0.5)
    whole_steps(axes, 5)
    axes.tick_params(labelsize=7.5)
