"""Throughput against memory: every cell a point with its name in a margin of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from bench.derive.metrics import THROUGHPUT, Metric
from reports.plots.style import GREY, Look, drawing, label, svg, wrapped
from reports.views.cells import Cell

_MIB = 2**20
_WIDTH_INCHES = 11.0
_LEGEND_INCHES = 0.34
_LEGEND_COLUMNS = 6
_MOST_IN_LEGEND = 6
MOST_NAMES = 48


def throughput_figure(cells: Sequence[Cell], metric: Metric, look_of: Mapping[str, Look]) -> str:
    """Scatter of the measured cells. Up and to the left is better.

    A line joins the Pareto front: cells that no other one beats in both. Bars span the runs of a
    cell that has several.

    Names stand in a column right of the plot, in the order of throughput, each joined to its
    point: however close points are, names never overlap. Of more than `MOST_NAMES` points those of
    the front are named first, then the fastest.
    """
    points = sorted(
        (
            (throughput, memory / _MIB, cell)
            for cell in cells
            if (throughput := cell.value(THROUGHPUT)) is not None
            and (memory := cell.value(metric)) is not None
        ),
        key=lambda point: -point[0],
    )
    front = pareto_front([(throughput, memory) for throughput, memory, _ in points])
    named = sorted(range(len(points)), key=lambda i: (i not in front, i))[:MOST_NAMES]
    height = max(3.8, 1.1 + 0.24 * len(named)) + _LEGEND_INCHES
    with drawing(_WIDTH_INCHES, height, arranged=False) as figure:
        axes = figure.subplots()
        top = 1 - (0.1 + _LEGEND_INCHES) / height
        figure.subplots_adjust(left=0.075, right=0.68, top=top, bottom=0.53 / height)
        axes.plot(
            [points[i][1] for i in front],
            [points[i][0] for i in front],
            color=GREY,
            linewidth=1.1,
            drawstyle="steps-pre",
            zorder=1.2,
        )
        for throughput, memory, cell in points:
            look = look_of[cell.name]
            _spread_of_runs(axes, cell, memory, look)
            axes.plot(
                memory,
                throughput,
                look.marker,
                color=look.colour,
                markeredgecolor="white",
                markersize=8.5,
            )
        axes.margins(x=0.08, y=0.12)
        _name(axes, [points[i] for i in sorted(named)])
        axes.set_xlabel(f"{metric.title} (MiB)")
        axes.set_ylabel("throughput (tokens/s, all ranks)")
        handles = legend_handles([cell for _, _, cell in points], look_of)
        handles.append(Line2D([], [], color=GREY, linewidth=1.1, label="Pareto front"))
        figure.legend(
            handles=handles,
            loc="upper left",
            bbox_to_anchor=(0.068, 1 - 0.05 / height),
            ncols=min(_LEGEND_COLUMNS, max(1, len(handles))),
            borderaxespad=0.0,
            handletextpad=0.3,
        )
        return svg(figure, "throughput")


def legend_handles(cells: Sequence[Cell], look_of: Mapping[str, Look]) -> list[Line2D]:
    """A grey marker per dtype policy, then a dot per engine where colours tell engines apart.

    Where colours count through the cells, the name beside each point is their legend. The first
    `_MOST_IN_LEGEND` policies are explained.
    """
    policies = {cell.dtypes: look_of[cell.name].marker for cell in cells}
    handles = [_handle(marker, GREY, policy) for policy, marker in policies.items()]
    del handles[_MOST_IN_LEGEND:]
    colours: dict[str, set[str]] = {}
    for cell in cells:
        colours.setdefault(cell.resolved.engine.name, set()).add(look_of[cell.name].colour)
    told_apart = len(set().union(*colours.values())) == len(colours)
    if told_apart and all(len(found) == 1 for found in colours.values()):
        handles += [_handle(".", colour, engine) for engine, (colour,) in colours.items()]
    return handles


def _handle(marker: str, colour: str, text: str) -> Line2D:
    size = 13.0 if marker == "." else 8.0
    return Line2D(
        [],
        [],
        linestyle="",
        marker=marker,
        color=colour,
        markeredgecolor="white",
        markersize=size,
        label=label(text),
    )


def _name(axes: Axes, points: Sequence[tuple[float, float, Cell]]) -> None:
    low, high = axes.get_ylim()
    wanted = [(throughput - low) / (high - low) for throughput, _, _ in points]
    gap = min(0.075, 1.0 / max(1, len(points)))
    for (throughput, memory, cell), height in zip(points, spread(wanted, gap), strict=True):
        axes.annotate(
            wrapped(cell.name, 52),
            (memory, throughput),
            xytext=(1.035, height),
            textcoords="axes fraction",
            va="center",
            fontsize=8,
            color="#25282d",
            annotation_clip=False,
            arrowprops={
                "arrowstyle": "-",
                "color": GREY,
                "linewidth": 0.5,
                "relpos": (0.0, 0.5),
                "shrinkA": 1,
                "shrinkB": 5,
            },
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


def _spread_of_runs(axes: Axes, cell: Cell, memory: float, look: Look) -> None:
    """A bar from the slowest to the fastest run of a cell with several."""
    runs = cell.values(THROUGHPUT)
    if len(runs) > 1:
        axes.plot([memory] * 2, [min(runs), max(runs)], color=look.colour, linewidth=1.3)


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
