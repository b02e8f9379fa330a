"""Memory by category: stacked bars next to the peak of each cell, and one step over time."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes

from bench.derive.metrics import ALLOCATOR_PEAK, RSS
from bench.derive.timeline import Moment, moments, peak
from bench.record import MemoryTimeline
from reports.plots.style import (
    GREY,
    INK,
    MIB,
    category_look,
    drawing,
    in_order,
    label,
    panels,
    svg,
    top_legend,
    wrapped,
)
from reports.views.cells import Cell

MOST_CELLS = 48
MOST_TIMELINES = 12
_MOST_POINTS = 3000
_MOST_NAMED_MARKS = 8


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


def memory_timeline_figure(shown: Sequence[tuple[str, MemoryTimeline]]) -> str:
    """(cell's name, its timeline) to panels on one scale of bytes; the first `MOST_TIMELINES`."""
    shown = shown[:MOST_TIMELINES]
    series = [_thinned(moments(timeline)) for _, timeline in shown]
    names = (name for held in series for m in held for name in m.by_category)
    categories = in_order(names)
    top = 1.18 * max(m.total_bytes for held in series for m in held) / MIB or 1.0
    labels = ("time in the step (ms)", "held by rank 0 (MiB)")
    with panels(len(shown), 2, 2.35, labels, top=0.85, hspace=0.55) as (figure, grid):
        for axes, (name, timeline), held in zip(grid, shown, series, strict=True):
            end = max(timeline.milliseconds, held[-1].milliseconds)
            _stack(axes, held, categories, end)
            axes.set_xlim(0, end or 1.0)
            axes.set_ylim(0, top)
            axes.tick_params(labelsize=8)
            axes.set_title(wrapped(name, 78), loc="left", fontsize=9, pad=15)
            _marks(axes, timeline, end)
            _mark_peak(axes, timeline, end)
        handles = {
            text: handle
            for axes in grid
            for handle, text in zip(*axes.get_legend_handles_labels(), strict=True)
        }
        top_legend(figure, list(handles.values()), len(categories) + 1)
        return svg(figure, "memory-timeline")


def _stack(axes: Axes, held: Sequence[Moment], categories: Sequence[str], end: float) -> None:
    times = [*(m.milliseconds for m in held), end]
    below = [0.0] * len(times)
    for category in categories:
        heights = [m.by_category.get(category, 0) / MIB for m in (*held, held[-1])]
        above = [low + height for low, height in zip(below, heights, strict=True)]
        look = category_look(category, categories)
        axes.fill_between(times, below, above, step="post", lw=0, **look)
        below = above
    if any(m.idle_bytes for m in held):
        used = [(m.total_bytes - m.idle_bytes) / MIB for m in (*held, held[-1])]
        text = "without idle pool slots"
        axes.step(times, used, where="post", color=INK, linewidth=1.0, label=text)


def _marks(axes: Axes, timeline: MemoryTimeline, end: float) -> None:
    """Where microbatches and the update begin; their names stand above the panel."""
    parts = [(at, name) for at, name in timeline.marks if name != "clip"]
    ends = [at for at, _ in parts[1:]] + [end]
    for (at, name), until in zip(parts, ends, strict=False):
        axes.axvline(at, color=INK, linewidth=0.6, linestyle=":")
        if len(parts) <= _MOST_NAMED_MARKS and until - at > 0.04 * end:
            text = axes.text((at + until) / 2, 1.02, label(name, 16), fontsize=7.5, ha="center")
            text.set(color="#59626d", va="bottom", transform=axes.get_xaxis_transform())


def _mark_peak(axes: Axes, timeline: MemoryTimeline, end: float) -> None:
    highest = peak(timeline).moment
    at, total = highest.milliseconds, highest.total_bytes / MIB
    axes.plot([at], [total], marker="v", color=INK, markersize=6, clip_on=False, zorder=3)
    late = at > 0.6 * (end or 1.0)
    axes.annotate(
        f"peak {total:,.1f} MiB at {at:,.0f} ms",
        (at, total),
        xytext=(-7 if late else 7, 4),
        textcoords="offset points",
        ha="right" if late else "left",
        va="bottom",
        fontsize=8,
        color=INK,
    )


def _thinned(held: Sequence[Moment]) -> list[Moment]:
    """At most `_MOST_POINTS`, of equal stretches the highest: no peak is lost."""
    stretch = -(-len(held) // _MOST_POINTS)
    return [
        max(held[first : first + stretch], key=lambda m: m.total_bytes)
        for first in range(0, len(held), stretch)
    ]
