"""Bytes by verdict, one bar per operation."""

from __future__ import annotations

from collections.abc import Mapping

from reports.nccl.rows import Verdict
from reports.plots.style import BLUE, GREEN, GREY, ORANGE, SKY, drawing, label, stacked_bars, svg

_LOOKS = {
    Verdict.SYMMETRIC: (GREEN, ""),
    Verdict.COPY_ENGINE: (BLUE, "///"),
    Verdict.HIERARCHICAL_CE: (SKY, "..."),
    Verdict.REGULAR: (ORANGE, "\\\\\\"),
    Verdict.NO_EVIDENCE: (GREY, "xx"),
}
_GIB = 2**30


def nccl_bytes_figure(title: str, found: Mapping[str, Mapping[Verdict, int]], salt: str) -> str:
    """Stacked bars of calls x bytes (GiB), from data such as `bytes_by_verdict` gives."""
    names = sorted(found)
    with drawing(9.0, 1.3 + 0.34 * len(names)) as figure:
        axes = figure.subplots(1, 1)
        layers = (
            (str(verdict), look, [found[name].get(verdict, 0) / _GIB for name in names])
            for verdict, look in _LOOKS.items()
        )
        stacked_bars(axes, layers, 0.66)
        axes.set_yticks(range(len(names)), [label(name) for name in names])
        axes.invert_yaxis()
        axes.set_xlabel("calls x bytes (GiB)")
        axes.grid(visible=False, axis="y")
        axes.set_title(label(title, 90), loc="left")
        handles, labels = axes.get_legend_handles_labels()
        if handles:
            figure.legend(handles, labels, loc="outside lower center", ncols=5, fontsize=8)
        return svg(figure, salt)
