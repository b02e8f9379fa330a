"""Memory of one step by category over time, one panel per cell, with the peak marked."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from bench.derive.timeline import Moment, moments, peak
from bench.record import MemoryTimeline
from reports.plots.style import LASTING_FIRST, category_look, drawing, in_order, label, svg, wrapped

_MIB = 2**20
_WIDTH_INCHES = 11.0
_PANEL_INCHES = 2.35
_TOP_INCHES = 0.85
_BOTTOM_INCHES = 0.55
_COLUMNS = 2
_MOST_POINTS = 3000
_MOST_NAMED_MARKS = 8
_INK = "#25282d"
MOST_TIMELINES = 12


def memory_timeline_figure(shown: Sequence[tuple[str, MemoryTimeline]]) -> str:
    """(cell's name, its timeline) to panels on one scale of bytes; the first `MOST_TIMELINES`."""
    shown = shown[:MOST_TIMELINES]
    series = [_thinned(moments(timeline)) for _, timeline in shown]
    categories = in_order(
        (name for found in series for m in found for name in m.by_category), LASTING_FIRST
    )
    pooled = any(m.idle_bytes for found in series for m in found)
    top = 1.18 * max(max(m.total_bytes for m in found) for found in series) / _MIB or 1.0
    columns = min(_COLUMNS, len(shown))
    rows = -(-len(shown) // columns)
    height = _TOP_INCHES + _BOTTOM_INCHES + _PANEL_INCHES * rows
    with drawing(_WIDTH_INCHES, height, arranged=False) as figure:
        panels = figure.subplots(rows, columns, squeeze=False, sharey=True).flatten()
        figure.subplots_adjust(
            left=0.07,
            right=0.985,
            top=1 - _TOP_INCHES / height,
            bottom=_BOTTOM_INCHES / height,
            wspace=0.06,
            hspace=0.55,
        )
        for axes, (name, timeline), found in zip(panels, shown, series, strict=False):
            _panel(axes, timeline, found, categories, top)
            axes.set_title(wrapped(name, 78), loc="left", fontsize=9, pad=15)
        for axes in panels[len(shown) :]:
            axes.set_axis_off()
        figure.supxlabel("time in the step (ms)", fontsize=9, y=0.12 / height)
        figure.supylabel("held by rank 0 (MiB)", fontsize=9, x=0.008)
        figure.legend(
            handles=_legend(categories, pooled=pooled),
            loc="upper left",
            bbox_to_anchor=(0.06, 1 - 0.03 / height),
            ncols=len(categories) + 1,
            fontsize=8.5,
            borderaxespad=0.0,
        )
        return svg(figure, "memory-timeline")


def _panel(
    axes: Axes,
    timeline: MemoryTimeline,
    found: Sequence[Moment],
    categories: Sequence[str],
    top: float,
) -> None:
    end = max(timeline.milliseconds, found[-1].milliseconds)
    times = [*(m.milliseconds for m in found), end]
    below = [0.0] * len(times)
    for category in categories:
        heights = [m.by_category.get(category, 0) / _MIB for m in found]
        heights.append(heights[-1])
        above = [low + height for low, height in zip(below, heights, strict=True)]
        colour, hatch = category_look(category, categories)
        axes.fill_between(
            times, below, above, step="post", facecolor=colour, hatch=hatch, edgecolor="white", lw=0
        )
        below = above
    if any(m.idle_bytes for m in found):
        used = [(m.total_bytes - m.idle_bytes) / _MIB for m in found]
        axes.step(times, [*used, used[-1]], where="post", color=_INK, linewidth=1.0)
    axes.set_xlim(0, end or 1.0)
    axes.set_ylim(0, top)
    axes.tick_params(labelsize=8)
    _marks(axes, timeline, end)
    _peak(axes, timeline, end)


def _marks(axes: Axes, timeline: MemoryTimeline, end: float) -> None:
    """Where microbatches and the update begin; their names stand above the panel."""
    parts = [(at, name) for at, name in timeline.marks if name != "clip"]
    named = len(parts) <= _MOST_NAMED_MARKS
    ends = [at for at, _ in parts[1:]] + [end]
    for (at, name), until in zip(parts, ends, strict=False):
        axes.axvline(at, color=_INK, linewidth=0.6, linestyle=":")
        if named and until - at > 0.04 * end:
            axes.annotate(
                label(name, 16),
                ((at + until) / 2, 1.02),
                xycoords=axes.get_xaxis_transform(),
                ha="center",
                va="bottom",
                fontsize=7.5,
                color="#59626d",
            )


def _peak(axes: Axes, timeline: MemoryTimeline, end: float) -> None:
    highest = peak(timeline).moment
    at, total = highest.milliseconds, highest.total_bytes / _MIB
    axes.plot([at], [total], marker="v", color=_INK, markersize=6, clip_on=False, zorder=3)
    late = at > 0.6 * (end or 1.0)
    axes.annotate(
        f"peak {total:,.1f} MiB at {at:,.0f} ms",
        (at, total),
        xytext=(-7 if late else 7, 4),
        textcoords="offset points",
        ha="right" if late else "left",
        va="bottom",
        fontsize=8,
        color=_INK,
    )


def _legend(categories: Sequence[str], *, pooled: bool) -> list[Patch | Line2D]:
    handles: list[Patch | Line2D] = []
    for category in categories:
        colour, hatch = category_look(category, categories)
        name = label(category.replace("_", " "))
        handles.append(Patch(facecolor=colour, hatch=hatch, edgecolor="white", lw=0, label=name))
    if pooled:
        handles.append(Line2D([], [], color=_INK, linewidth=1.0, label="without idle pool slots"))
    return handles


def _thinned(found: Sequence[Moment]) -> list[Moment]:
    """At most `_MOST_POINTS`, of equal stretches the highest: no peak is lost."""
    if len(found) <= _MOST_POINTS:
        return list(found)
    stretch = -(-len(found) // _MOST_POINTS)
    return [
        max(found[first : first + stretch], key=lambda m: m.total_bytes)
        for first in range(0, len(found), stretch)
    ]
