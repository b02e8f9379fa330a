"""A metric over commits and days: every start, the medians of the points, and the levels."""

from __future__ import annotations

from functools import partial

from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from reports.history.change_points import FEWEST_STARTS, Levels, level_medians
from reports.history.series import Series
from reports.plots.style import BLUE, GREY, VERMILLION, drawing, svg
from reports.renderers import quantity

_MIB = 2**20
_PANEL_INCHES = 2.5
_MOST_LABELS = 12
_FLAT = 0.02


def history_figure(name: str, series: Series, levels: Levels) -> str:
    """One panel over the whole width; `name` sets the figure apart from others of its page."""
    in_bytes = series.metric.unit == "bytes"
    scale = 1 / _MIB if in_bytes else 1.0
    values = [[value * scale for value in point.values] for point in series.points]
    # Points that decide nothing.
    varies = series.metric.judge == "interval"
    few = [at for at, own in enumerate(values) if varies and len(own) < FEWEST_STARTS]
    with drawing(11.0, _PANEL_INCHES) as figure:
        axes = figure.subplots()
        _starts(axes, series, values, few, scale)
        for first, end, level in level_medians(series, levels):
            axes.hlines(level * scale, first - 0.4, end - 0.6, color=BLUE, linewidth=1.6)
        _scale(axes, values)
        for change in levels.changes:
            at, colour = change.after, BLUE
            if change.judgement.verdict == "regressed":
                colour = VERMILLION
            axes.axvline(at - 0.5, color=colour, linewidth=1.2, linestyle="--")
            near_the_end = at > 0.8 * len(values)
            axes.annotate(
                quantity.change(change.judgement.change),
                (at - 0.5, 1.0),
                xycoords=("data", "axes fraction"),
                xytext=(-4 if near_the_end else 4, -2),
                textcoords="offset points",
                ha="right" if near_the_end else "left",
                va="top",
                fontsize=8.5,
                color=colour,
            )
        axes.set_ylabel(series.metric.title + (", MiB" if in_bytes else ""))
        figure.legend(handles=_legend(few), loc="outside lower left", ncols=4, fontsize=8)
        return svg(figure, name)


def _starts(
    axes: Axes, series: Series, values: list[list[float]], few: list[int], scale: float
) -> None:
    for at, own in enumerate(values):
        axes.plot([at] * len(own), own, "_", color=GREY, markersize=7, alpha=0.9)
    medians = [point.value * scale for point in series.points]
    full = [at for at in range(len(values)) if at not in few]
    axes.plot(full, [medians[at] for at in full], "o", color=BLUE, markersize=4)
    axes.plot(few, [medians[at] for at in few], "o", color=BLUE, markersize=4, fillstyle="none")
    shown = range(0, len(values), max(1, -(-len(values) // _MOST_LABELS)))
    labels = [f"{series.points[at].day[5:]}\n{series.points[at].short[:7]}" for at in shown]
    axes.set_xticks(list(shown), labels, fontsize=7.5)
    axes.set_xlim(-0.7, len(values) - 0.3)


def _scale(axes: Axes, values: list[list[float]]) -> None:
    """Room for the texts above, and no more of it than makes noise look like noise."""
    low, high = min(map(min, values)), max(map(max, values))
    room = max(high - low, _FLAT * abs(high))
    axes.set_ylim(low - 0.15 * room, high + 0.35 * room)


def _legend(few: list[int]) -> list[Line2D]:
    dot = partial(Line2D, [], [], color=BLUE, marker="o", linestyle="", markersize=4)
    found = [
        Line2D([], [], color=GREY, marker="_", linestyle="", label="a start"),
        dot(label="median of a point"),
        Line2D([], [], color=BLUE, linewidth=1.6, label="level"),
    ]
    if few:
        found.append(dot(fillstyle="none", label="too few starts to decide"))
    return found
