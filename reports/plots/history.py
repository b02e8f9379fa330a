"""A metric over commits and days: every start, the medians of the points, and the levels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from reports.plots.style import BLUE, GREY, VERMILLION, drawing, svg

_PANEL_INCHES = 2.5
_MOST_LABELS = 12
_FLAT = 0.02


@dataclass(frozen=True)
class HistoryPanel:
    """points: label and number per start, in order. levels: (first, behind the last, median).

    changes: (point, text, whether it is for the worse). few: points that decide nothing.
    """

    unit: str
    points: Sequence[tuple[str, Sequence[float]]]
    medians: Sequence[float]
    levels: Sequence[tuple[int, int, float]]
    changes: Sequence[tuple[int, str, bool]]
    few: frozenset[int] = frozenset()


def history_figure(name: str, panel: HistoryPanel) -> str:
    """One panel over the whole width; `name` sets the figure apart from others of its page."""
    with drawing(11.0, _PANEL_INCHES) as figure:
        axes = figure.subplots()
        _starts(axes, panel)
        for first, end, level in panel.levels:
            axes.hlines(level, first - 0.4, end - 0.6, color=BLUE, linewidth=1.6)
        _scale(axes, panel)
        for at, text, worse in panel.changes:
            colour = VERMILLION if worse else BLUE
            axes.axvline(at - 0.5, color=colour, linewidth=1.2, linestyle="--")
            near_the_end = at > 0.8 * len(panel.points)
            axes.annotate(
                text,
                (at - 0.5, 1.0),
                xycoords=("data", "axes fraction"),
                xytext=(-4 if near_the_end else 4, -2),
                textcoords="offset points",
                ha="right" if near_the_end else "left",
                va="top",
                fontsize=8.5,
                color=colour,
            )
        axes.set_ylabel(panel.unit)
        figure.legend(handles=_legend(panel), loc="outside lower left", ncols=4, fontsize=8)
        return svg(figure, name)


def _starts(axes: Axes, panel: HistoryPanel) -> None:
    for at, (_, values) in enumerate(panel.points):
        axes.plot([at] * len(values), values, "_", color=GREY, markersize=7, alpha=0.9)
    full = [at for at in range(len(panel.points)) if at not in panel.few]
    axes.plot(full, [panel.medians[at] for at in full], "o", color=BLUE, markersize=4)
    few = sorted(panel.few)
    axes.plot(
        few, [panel.medians[at] for at in few], "o", color=BLUE, markersize=4, fillstyle="none"
    )
    every = max(1, -(-len(panel.points) // _MOST_LABELS))
    shown = range(0, len(panel.points), every)
    axes.set_xticks(list(shown), [panel.points[at][0] for at in shown], fontsize=7.5)
    axes.set_xlim(-0.7, len(panel.points) - 0.3)


def _scale(axes: Axes, panel: HistoryPanel) -> None:
    """Room for the texts above, and no more of it than makes noise look like noise."""
    values = [value for _, found in panel.points for value in found]
    low, high = min(values), max(values)
    room = max(high - low, _FLAT * abs(high))
    axes.set_ylim(low - 0.15 * room, high + 0.35 * room)


def _legend(panel: HistoryPanel) -> list[Line2D]:
    found = [
        Line2D([], [], color=GREY, marker="_", linestyle="", label="a start"),
        Line2D(
            [], [], color=BLUE, marker="o", linestyle="", markersize=4, label="median of a point"
        ),
        Line2D([], [], color=BLUE, linewidth=1.6, label="level"),
    ]
    if panel.few:
        found.append(
            Line2D(
                [],
                [],
                color=BLUE,
                marker="o",
                linestyle="",
                markersize=4,
                fillstyle="none",
                label="too few starts to decide",
            )
        )
    return found
