"""Bus bandwidth over size: a panel per operation, a line per memory, transport and dtype."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator

from bench.derive.metrics import BUS_BANDWIDTH
from reports.plots.style import CYCLE, DASHES, MARKERS, drawing, label, svg
from reports.renderers import quantity
from reports.views.cells import Cell

_PANELS_PER_ROW = 2
_ROW_INCHES = 3.0
_LEGEND_COLUMNS = 3
_LEGEND_ROW_INCHES = 0.2

Lines = dict[str, dict[str, list[tuple[int, float]]]]


def bandwidth_figure(cells: Sequence[Cell]) -> str:
    """Measured collectives; both axes are logarithmic."""
    lines = _lines(cells)
    names = list(dict.fromkeys(name for own in lines.values() for name in own))
    rows = -(-len(lines) // _PANELS_PER_ROW)
    legend = _LEGEND_ROW_INCHES * (1 + -(-len(names) // _LEGEND_COLUMNS))
    with drawing(11.0, _ROW_INCHES * rows + legend) as figure:
        panels = figure.subplots(rows, _PANELS_PER_ROW, squeeze=False).flatten()
        for axes in panels[len(lines) :]:
            axes.set_axis_off()
        for axes, (operation, own) in zip(panels, lines.items(), strict=False):
            _panel(axes, operation, own, names)
        handles = {
            name: handle
            for axes in panels
            for handle, name in zip(*axes.get_legend_handles_labels(), strict=True)
        }
        figure.legend(handles.values(), handles, loc="outside lower left", ncols=_LEGEND_COLUMNS)
        return svg(figure, "bandwidth")


def _lines(cells: Sequence[Cell]) -> Lines:
    """Operation -> name of a line -> (bytes, GB/s), by size.

    A line is what its cells have in common besides operation and size; of two cells of one size on
    one line, which differ in something else, the line shows the faster.
    """
    found: dict[str, dict[str, dict[int, float]]] = {}
    for cell in cells:
        resolved, collective = cell.resolved, cell.resolved.collective
        value = cell.value(BUS_BANDWIDTH)
        if collective is None or value is None:
            continue
        words: list[str] = [collective.registration]
        words += ["copy engine"] if resolved.launch.copy_engine else []
        words += [collective.transport, resolved.dtypes.compute, f"{resolved.launch.ranks} ranks"]
        words += [] if cell.arm is None else [f"[{cell.arm}]"]
        line = found.setdefault(collective.operation, {}).setdefault(", ".join(words), {})
        size = collective.size_bytes
        line[size] = max(line.get(size, value), value)
    return {
        operation: {name: sorted(line.items()) for name, line in own.items()}
        for operation, own in found.items()
    }


def _panel(
    axes: Axes, operation: str, own: dict[str, list[tuple[int, float]]], names: Sequence[str]
) -> None:
    for name, points in own.items():
        at = names.index(name)
        axes.plot(
            [size for size, _ in points],
            [rate for _, rate in points],
            color=CYCLE[at % len(CYCLE)],
            linestyle=DASHES[at // len(CYCLE) % len(DASHES)],
            marker=MARKERS[at % len(MARKERS)],
            markersize=5,
            linewidth=1.4,
            label=label(name, 60),
        )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    sizes = sorted({size for points in own.values() for size, _ in points})
    axes.set_xticks(sizes, [quantity.binary_bytes(size) for size in sizes])
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.minorticks_off()
    axes.set_title(operation, loc="left")
    axes.set_ylabel("bus bandwidth (GB/s)")
