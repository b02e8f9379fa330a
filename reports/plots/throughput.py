"""Throughput against memory: every cell a point with its name in a margin of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from bench.derive.metrics import THROUGHPUT, Metric
from reports.plots.style import GREY, INK, MIB, Look, drawing, label, svg, top_legend, wrapped
from reports.views.cells import Cell

_LEGEND_INCHES = 0.34
_LEGEND_COLUMNS = 6
_MOST_IN_LEGEND = 6
MOST_NAMES = 48
_Point = tuple[float, float, Cell]


def throughput_figure(cells: Sequence[Cell], metric: Metric, look_of: Mapping[str, Look]) -> str:
    """Scatter of the measured cells. Up and to the left is better.

    A line joins the Pareto front: cells that no other one beats in both. Bars span the runs of a
    cell that has several.

    Names stand in a column right of the plot, in the order of throughput, each joined to its
    point: however close points are, names never overlap. Of more than `MOST_NAMES` points those of
    the front are named first, then the fastest.
    """
    points: list[_Point] = []
    for cell in cells:
        rate, size = cell.value(THROUGHPUT), cell.value(metric)
        if rate is not None and size is not None:
            points.append((rate, size / MIB, cell))
    points.sort(key=lambda point: -point[0])
    front = pareto_front([point[:2] for point in points])
    named = sorted(range(len(points)), key=lambda i: (i not in front, i))[:MOST_NAMES]
    height = max(3.8, 1.1 + 0.24 * len(named)) + _LEGEND_INCHES
    with drawing(11.0, height, arranged=False) as figure:
        axes = figure.subplots()
        top = 1 - (0.1 + _LEGEND_INCHES) / height
        figure.subplots_adjust(left=0.075, right=0.68, top=top, bottom=0.53 / height)
        steps = [points[i] for i in front]
        (line,) = axes.plot([size for _, size, _ in steps], [rate for rate, _, _ in steps])
        line.set(color=GREY, linewidth=1.1, zorder=1.2, drawstyle="steps-pre", label="Pareto front")
        for rate, size, cell in points:
            look, runs = look_of[cell.name], cell.values(THROUGHPUT)
            axes.plot([size] * 2, [min(runs), max(runs)], color=look.colour, linewidth=1.3)
            (dot,) = axes.plot(size, rate, look.marker, color=look.colour, markersize=8.5)
            dot.set_markeredgecolor("white")
        axes.margins(x=0.08, y=0.12)
        _name(axes, [points[i] for i in sorted(named)])
        axes.set_xlabel(f"{metric.title} (MiB)")
        axes.set_ylabel("throughput (tokens/s, all ranks)")
        handles = [*legend_handles([cell for _, _, cell in points], look_of), line]
        top_legend(figure, handles, min(_LEGEND_COLUMNS, len(handles)), 0.068)
        return svg(figure, "throughput")


def legend_handles(cells: Sequence[Cell], look_of: Mapping[str, Look]) -> list[Line2D]:
    """A grey marker per dtype policy, then a dot per engine where colours tell engines apart.

    Where colours count through the cells, the name next to each point is their legend. The first
    `_MOST_IN_LEGEND` policies are explained.
    """
    policies = {cell.dtypes: (look_of[cell.name].marker, GREY) for cell in cells}
    shown = dict(list(policies.items())[:_MOST_IN_LEGEND])
    engines = {(cell.resolved.engine.name, look_of[cell.name].colour) for cell in cells}
    colours = {cell.resolved.engine.name: look_of[cell.name].colour for cell in cells}
    if len(engines) == len(colours) == len(set(colours.values())):
        shown |= {engine: (".", colour) for engine, colour in colours.items()}
    return [
        Line2D(
            *([], []),
            linestyle="",
            marker=marker,
            color=colour,
            markeredgecolor="white",
            markersize=13.0 if marker == "." else 8.0,
            label=label(text),
        )
        for text, (marker, colour) in shown.items()
    ]


def _name(axes: Axes, points: Sequence[_Point]) -> None:
    low, high = axes.get_ylim()
    wanted = [(rate - low) / (high - low) for rate, _, _ in points]
    gap = min(0.075, 1.0 / max(1, len(points)))
    line = {"arrowstyle": "-", "color": GREY, "linewidth": 0.5, "relpos": (0.0, 0.5)}
    for (rate, size, cell), height in zip(points, spread(wanted, gap), strict=True):
        axes.annotate(
            wrapped(cell.name, 52),
            (size, rate),
            xytext=(1.035, height),
            textcoords="axes fraction",
            va="center",
            fontsize=8,
            color=INK,
            annotation_clip=False,
            arrowprops={**line, "shrinkA": 1, "shrinkB": 5},
        )


def pareto_front(points: Sequence[tuple[float, float]]) -> list[int]:
    """Indices of the points (throughput, memory) that none beats in both, least memory first.

    A point is beaten by one with at least its throughput and at most its memory, better in one.
    """
    ordered = sorted(range(len(points)), key=lambda i: (points[i][1], -points[i][0]))
    front: list[int] = []
    for index in ordered:
        if not front or points[index][0] > points[front[-1]][0]:
            front.append(index)
    return front


def spread(wanted: Sequence[float], gap: float) -> list[float]:
    """Heights near the wanted ones (both descending), at least `gap` apart, within [0, 1].

    They fit if there are at most 1 / gap of them. Pushed down from the top, then up from below.
    """
    heights: list[float] = []
    for height in wanted:
        highest = heights[-1] - gap if heights else 1.0 - gap / 2
        heights.append(min(height, highest))
    lowest = gap / 2
    for index in range(len(heights) - 1, -1, -1):
        heights[index] = max(heights[index], lowest)
        lowest = heights[index] + gap
    return heights
