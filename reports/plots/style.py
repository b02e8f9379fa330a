"""One look for all figures, and one appearance per cell in all of them.

Colours are those of Okabe and Ito (2008), which stay apart under the common colour blindnesses; a
second channel (dash, marker, hatch) carries the same distinction without colour.

Memory categories have a colour and a hatch each, the same in every figure.
"""

from __future__ import annotations

import io
import re
import textwrap
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import matplotlib as mpl
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from bench.spec import STRATEGIES, engine_table
from reports.renderers.printable import printable
from reports.views.cells import Cell

BLACK, ORANGE, SKY, GREEN = "#000000", "#E69F00", "#56B4E9", "#009E73"
YELLOW, BLUE, VERMILLION, PURPLE = "#F0E442", "#0072B2", "#D55E00", "#CC79A7"
GREY, INK = "#8a8f98", "#25282d"
MIB = 2**20
CYCLE = (BLUE, VERMILLION, GREEN, PURPLE, ORANGE, SKY, BLACK)
DASHES = ("-", "--", "-.", ":")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")


_JOINTED = re.compile(r"[^_:,\- ]*[_:,\- ]+|[^_:,\- ]+")
_PATH = re.compile(r' (?:d|x|y)="[^"]*"|translate\([^)]*\)')
_LONG_NUMBER = re.compile(r"-?\d+\.\d{2,}")
_LINE_BREAK = re.compile(r" *\n\s*")

_RC: dict[Any, Any] = {
    "font.size": 9,
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "axes.titlesize": 9.5,
    "axes.titley": 1.0,  # where it would be found to belong, after a look at every label
    "axes.labelsize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e4e6ea",
    "grid.linewidth": 0.7,
    "axes.edgecolor": "#9aa0a8",
    "xtick.color": "#40454d",
    "ytick.color": "#40454d",
    "axes.labelcolor": "#25282d",
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "svg.fonttype": "path",
    "text.parse_math": False,  # a name may hold dollar signs
    "text.usetex": False,
}


class Look(NamedTuple):
    """How one cell is drawn everywhere."""

    colour: str
    dash: str
    marker: str


def looks(cells: Sequence[Cell]) -> dict[str, Look]:
    """By cell name: colour by engine, dash by strategy, marker by dtypes.

    Where two cells would look alike (a sweep over something else), colour and dash count through
    the cells instead.
    """
    policies = list(dict.fromkeys(cell.dtypes for cell in cells))
    colours = _engine_colours(cells)
    by_engine: dict[str, Look] = {}
    counted: dict[str, Look] = {}
    for number, cell in enumerate(cells):
        engine = cell.resolved.engine
        strategy = STRATEGIES.index(engine.strategy) if engine.strategy else 0
        marker = MARKERS[policies.index(cell.dtypes) % len(MARKERS)]
        by_engine[cell.name] = Look(colours[engine.name], DASHES[strategy % len(DASHES)], marker)
        dash = DASHES[number // len(CYCLE) % len(DASHES)]
        counted[cell.name] = Look(CYCLE[number % len(CYCLE)], dash, marker)
    return by_engine if len(set(by_engine.values())) == len(cells) else counted


def _engine_colours(cells: Sequence[Cell]) -> dict[str, str]:
    """Those of the table of engines; the next free one for an engine that has none there."""
    colours: dict[str, str] = {}
    for engine in dict.fromkeys(cell.resolved.engine.name for cell in cells):
        row = next((row for row in engine_table.TABLE if row.name == engine), None)
        taken = {*colours.values(), *(row.colour for row in engine_table.TABLE)}
        free = next((colour for colour in CYCLE if colour not in taken), GREY)
        colours[engine] = free if row is None else row.colour or free
    return colours


def label(name: str, limit: int = 44) -> str:
    """A short text in a figure, cut at `limit` characters: no cell is recognised by it alone."""
    return printable(name, limit)


def wrapped(name: str, width: int = 44) -> str:
    """A cell's whole name in lines of at most `width` characters, broken behind its joints."""
    lines = [""]
    for part in _JOINTED.findall(printable(name)):
        for piece in textwrap.wrap(part, width, drop_whitespace=False) or [part]:
            if lines[-1] and len(lines[-1]) + len(piece) > width:
                lines.append("")
            lines[-1] += piece
    return "\n".join(line.strip() for line in lines)


def whole_steps(axes: Axes, most: int = 8) -> None:
    """Label only whole steps on the horizontal axis, at most `most` of them."""
    axes.xaxis.set_major_locator(MaxNLocator(nbins=most, integer=True))


@contextmanager
def drawing(width: float, height: float, *, arranged: bool = True) -> Iterator[Figure]:
    """A new figure of this size in inches, with the common look while it is drawn.

    `arranged`: matplotlib's constrained layout places the axes; else the caller does.

    A name in a script that the font lacks is drawn as boxes, without a warning per character.
    """
    with mpl.rc_context(_RC), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"Glyph .* missing from", category=UserWarning)
        figure = Figure(figsize=(width, height), layout="constrained" if arranged else None)
        FigureCanvasSVG(figure)
        yield figure


@contextmanager
def panels(
    count: int,
    columns: int,
    inches: float,
    labels: tuple[str, str],
    *,
    top: float,
    hspace: float,
) -> Iterator[tuple[Figure, list[Axes]]]:
    """So many panels on one vertical scale, each so many inches high, below `top` inches.

    Placed by hand: constrained layout gives up on many small panels. labels: of both axes.
    """
    columns = min(columns, max(count, 1))
    rows = -(-count // columns)
    height = top + 0.5 + inches * rows
    with drawing(11.0, height, arranged=False) as figure:
        grid = figure.subplots(rows, columns, squeeze=False, sharey=True).flatten()
        edges = {"left": 0.066, "right": 0.988, "top": 1 - top / height, "bottom": 0.5 / height}
        figure.subplots_adjust(**edges, wspace=0.08, hspace=hspace)
        for unused in grid[count:]:
            unused.set_axis_off()
        figure.supxlabel(labels[0], fontsize=9, y=0.12 / height)
        figure.supylabel(labels[1], fontsize=9, x=0.006)
        yield figure, list(grid[:count])


def top_legend(figure: Figure, handles: Sequence[Artist], columns: int, left: float = 0.06) -> None:
    """One legend above all axes."""
    figure.legend(
        handles=handles,
        loc="upper left",
        bbox_to_anchor=(left, 1 - 0.03 / figure.get_figheight()),
        ncols=columns,
        borderaxespad=0.0,
        handletextpad=0.4,
    )


def svg(figure: Figure, salt: str) -> str:
    """The figure as one `<svg>` element, the same text for the same data.

    Args:
        figure: call inside `drawing`.
        salt: differs between the figures of one page, so that their element ids do too.
    """
    if (engine := figure.get_layout_engine()) is not None:
        engine.execute(figure)
        figure.set_layout_engine(None)  # or all of it would be drawn twice
    buffer = io.StringIO()
    with mpl.rc_context({"svg.hashsalt": salt}):
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None, "Type": None})
    text = buffer.getvalue()
    # A tenth of a point is far below a pixel, and no line break means anything.
    return _LINE_BREAK.sub("", _PATH.sub(_rounded, text[text.index("<svg") :]))


def _rounded(path: re.Match[str]) -> str:
    return _LONG_NUMBER.sub(lambda number: f"{float(number.group()):.1f}", path.group())


# What lasts through a step before what comes and goes: the base of a stack stays flat.
ORDER = (
    "main_weights",
    "gradients",
    "optimizer_state",
    "compute_weights",
    "communication_buffers",
    "activations",
)
_COLOURS = (BLUE, VERMILLION, ORANGE, SKY, GREEN, PURPLE, YELLOW, GREY)
# Lines only: matplotlib draws a dotted hatch as thousands of curves, 150 kB per figure.
_HATCHES = ("", "", "--", "///", "", "\\\\\\", "xx", "")


def in_order(categories: Iterable[str]) -> list[str]:
    """Known categories in their order, then unknown ones as they came."""
    names = list(dict.fromkeys(categories))
    return [name for name in ORDER if name in names] + [n for n in names if n not in ORDER]


def category_look(category: str, others: Iterable[str]) -> dict[str, Any]:
    """How its area is drawn; unknown ones get what `ORDER` leaves, by their place in `others`."""
    index = [*ORDER, *(name for name in others if name not in ORDER)].index(category)
    return {
        "facecolor": _COLOURS[index % len(_COLOURS)],
        "hatch": _HATCHES[index % len(_HATCHES)],
        "edgecolor": "white",
        "label": label(category.replace("_", " ")),
    }
