"""Loss curves per dtype policy, and their difference from the policy's reference cell."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from matplotlib.axes import Axes
from matplotlib.ticker import NullFormatter

from reports.compare.parity import ParityGroup, ParityRow, losses
from reports.compare.series import Gap, Steps
from reports.plots.style import GREY, Look, drawing, label, svg, whole_steps
from reports.views.cells import Cell

_LOWEST_FLOOR = 1e-16
_THINNEST, _THICKER, _THICKEST = 1.2, 1.8, 9.0
_ROW_INCHES = 2.9
_LEGEND_ROW_INCHES = 0.19
MOST_GROUPS = 6
MOST_CURVES = 16
_Curves = Sequence[tuple[Cell, Steps]]


def most_different(groups: Sequence[ParityGroup]) -> list[ParityGroup]:
    """What one figure can show: groups and cells that differ most from their reference.

    At most `MOST_GROUPS`, each with its reference and at most `MOST_CURVES` others, in their order.
    """

    def of_bound(group: ParityGroup) -> float:
        apart = (_difference(row) for row in group.rows if row.cell is not group.reference)
        return max(apart, default=0.0) / group.tolerance.bound

    chosen = sorted(groups, key=of_bound, reverse=True)[:MOST_GROUPS]
    return [_with_fewer_rows(group) for group in groups if group in chosen]


def _with_fewer_rows(group: ParityGroup) -> ParityGroup:
    others = [row for row in group.rows if row.cell is not group.reference]
    kept = sorted(others, key=_difference, reverse=True)[:MOST_CURVES]
    rows = (row for row in group.rows if row.cell is group.reference or row in kept)
    return replace(group, rows=tuple(rows))


def _difference(row: ParityRow) -> float:
    """From the reference; of losses that cannot be compared step by step it is infinite."""
    if row.verdict == "steps differ" or row.max_relative is None:
        return math.inf
    return row.max_relative


def loss_figure(groups: Sequence[ParityGroup], look_of: Mapping[str, Look]) -> str:
    """One row per group: losses left, |relative difference| to the reference right, then legend.

    The first run of each cell is drawn, the later ones thinner, so that a curve below another one
    is seen. A cell whose losses are the reference's, bit for bit, is called equal and has no curve
    of differences.
    """
    heights = [max(_ROW_INCHES, 0.7 + _LEGEND_ROW_INCHES * (len(g.rows) + 1)) for g in groups]
    with drawing(11.0, sum(heights)) as figure:
        ratios = {"height_ratios": heights}
        rows = figure.subplots(len(groups), 2, squeeze=False, gridspec_kw=ratios)
        for (left, right), group in zip(rows, groups, strict=True):
            curves = [(row.cell, losses(row.cell.finished[0].record)) for row in group.rows]
            base = losses(group.reference.finished[0].record)
            _losses(left, group, curves, base, look_of)
            _differences(right, group, curves, base, look_of)
            handles, names = left.get_legend_handles_labels()
            right.legend(handles, names, loc="upper left", bbox_to_anchor=(1.02, 1.02))
        return svg(figure, "loss")


def _losses(
    axes: Axes, group: ParityGroup, curves: _Curves, base: Steps, look_of: Mapping[str, Look]
) -> None:
    for later, (cell, values) in zip(range(len(curves) - 1, -1, -1), curves, strict=True):
        look = look_of[cell.name]
        equal = " (equal)" if values == base else ""
        axes.plot(
            [*values],
            [*values.values()],
            color=look.colour,
            linestyle=look.dash,
            linewidth=min(_THINNEST + _THICKER * later, _THICKEST),
            label=label(cell.name) + (" (reference)" if cell is group.reference else equal),
        )
    axes.set_title(f"Loss, {label(group.label)}", loc="left")
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nats per token)")
    whole_steps(axes)


def _differences(
    axes: Axes, group: ParityGroup, curves: _Curves, base: Steps, look_of: Mapping[str, Look]
) -> None:
    gaps = {
        cell.name: Gap.of(base, values) for cell, values in curves if cell is not group.reference
    }
    apart = {name: gap.sizes if gap else [] for name, gap in gaps.items()}
    drawn = {name: values for name, values in apart.items() if any(values)}
    positive = [value for values in drawn.values() for value in values if 0 < value < math.inf]
    # Where exact agreement, which has no place on a logarithmic axis, is drawn.
    floor = max(_LOWEST_FLOOR, min(positive, default=1e-9) / 5)
    for name, values in drawn.items():
        # Beyond every scale where the reference is 0: a gap, as of what is not a number.
        shown = [max(value, floor) if math.isfinite(value) else math.nan for value in values]
        look, steps = look_of[name], range(1, len(shown) + 1)
        axes.plot(steps, shown, color=look.colour, linestyle=look.dash, linewidth=1.3)
    bound = group.tolerance.bound
    title = f"Difference from {label(group.reference.name, 30)}"
    axes.set_title(f"{title} (line: bound {bound:.1e})" if drawn else title, loc="left")
    if not drawn:
        text = "nothing to compare with"
        if any(apart.values()):
            has_all_steps = all(len(values) == len(base) for _, values in curves)
            which = (
                "all losses"
                if has_all_steps
                else "numbers of steps differ; losses of steps that both have"
            )
            text = f"{which} are equal, bit for bit"
        axes.set_axis_off()
        axes.text(0.5, 0.5, text, ha="center", transform=axes.transAxes)
        return
    axes.set_xlabel("step")
    axes.set_ylabel("|relative difference|")
    axes.set_yscale("log")
    # Plain text: mathtext is off, because a name may hold dollar signs.
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0e}")
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.axhline(bound, color=GREY, linewidth=1.4)
    _, high = axes.get_ylim()
    axes.set_ylim(floor / 2, max(high, bound * 8))
    whole_steps(axes)
