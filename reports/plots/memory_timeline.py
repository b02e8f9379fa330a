"""Memory of one step by category over time, one panel per cell, with the peak marked."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes

from bench.derive.timeline import Moment, moments, peak
from bench.record import MemoryTimeline
from reports.plots.style import (
    INK,
    LASTING_FIRST,
    MIB,
    category_look,
    in_order,
    label,
    panels,
    svg,
    top_legend,
    wrapped,
)

_MOST_POINTS = 3000
_MOST_NAMED_MARKS = 8
MOST_TIMELINES = 12


def memory_timeline_figure(shown: Sequence[tuple[str, MemoryTimeline]]) -> str:
    """(cell's name, its timeline) to panels on one scale of bytes; the first `MOST_TIMELINES`."""
    shown = shown[:MOST_TIMELINES]
    series = [_thinned(moments(timeline)) for _, timeline in shown]
    names = (name for found in series for m in found for name in m.by_category)
    categories = in_order(names, LASTING_FIRST)
    top = 1.18 * max(m.total_bytes for found in series for m in found) / MIB or 1.0
    labels = ("time in the step (ms)", "held by rank 0 (MiB)")
    with panels(len(shown), 2, 2.35, labels, top=0.85, hspace=0.55) as (figure, grid):
        for axes, (name, timeline), found in zip(grid, shown, series, strict=True):
            end = max(timeline.milliseconds, found[-1].milliseconds)
            _stack(axes, found, categories, end)
            axes.set_xlim(0, end or 1.0)
            axes.set_ylim(0, top)
            axes.tick_params(labelsize=8)
            axes.set_title(wrapped(name, 78), loc="left", fontsize=9, pad=15)
            _marks(axes, timeline, end)
            _peak(axes, timeline, end)
        handles = {
            text: handle
            for axes in grid
            for handle, text in zip(*axes.get_legend_handles_labels(), strict=True)
        }
        top_legend(figure, list(handles.values()), len(categories) + 1)
        return svg(figure, "memory-timeline")


def _stack(axes: Axes, found: Sequence[Moment], categories: Sequence[str], end: float) -> None:
    times = [*(m.milliseconds for m in found), end]
    below = [0.0] * len(times)
    for category in categories:
        heights = [m.by_category.get(category, 0) / MIB for m in (*found, found[-1])]
        above = [low + height for low, height in zip(below, heights, strict=True)]
        look = category_look(category, categories)
        axes.fill_between(times, below, above, step="post", lw=0, **look)
        below = above
    if any(m.idle_bytes for m in found):
        used = [(m.total_bytes - m.idle_bytes) / MIB for m in (*found, found[-1])]
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


def _peak(axes: Axes, timeline: MemoryTimeline, end: float) -> None:
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


def _thinned(found: Sequence[Moment]) -> list[Moment]:
    """At most `_MOST_POINTS`, of equal stretches the highest: no peak is lost."""
    stretch = -(-len(found) // _MOST_POINTS)
    return [
        max(found[first : first + stretch], key=lambda m: m.total_bytes)
        for first in range(0, len(found), stretch)
    ]
