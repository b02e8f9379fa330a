"""Tables for a terminal or a log file: aligned text without control characters.

A terminal is so many columns wide, and long texts wrap inside their column. A file or a pipe gets
one line per row, as long as it needs to be.
"""

from __future__ import annotations

import io
import unicodedata
from collections.abc import Iterable
from contextvars import ContextVar
from textwrap import wrap

from reports.renderers.document import (
    Block,
    Bullets,
    Code,
    Details,
    Facts,
    Heading,
    Paragraph,
    TableBlock,
)
from reports.renderers.printable import printable
from reports.renderers.table import Align, RowKind, Table

_MARKS: dict[RowKind, str] = {"plain": " ", "reference": "*", "bad": "!", "unsteady": "~"}
_FOLDED = "(folded; Markdown and JSON have them)"
_UNSTEADY = "undecided, not steady or not measured"

_NARROWEST_TEXT = 16

_width_of_terminal: ContextVar[int | None] = ContextVar("width_of_terminal", default=None)


def show_on_terminal(width: int) -> None:
    """From now on tables fit into `width` columns, where their numbers can."""
    _width_of_terminal.set(width)


def blocks(of: Iterable[Block], *, opened: bool = True) -> str:
    """Blocks with an empty line between them; figures are left out.

    opened: whether what is folded away is shown too, and not its title alone.
    """
    parts = []
    for block in of:
        match block:
            case Paragraph(text) | Heading(text):
                shown = printable(text)
            case Bullets():
                shown = "\n".join(_item(*item) for item in block.lists)
            case Facts(items):
                shown = "\n".join(printable(f"{name}: {text}") for name, text in items)
            case TableBlock(data, caption):
                shown = table(data) + (f"\n\n{printable(caption)}" if caption else "")
            case Code(text):
                shown = "\n".join(map(printable, text.splitlines()))
            case Details(title, text, inner):
                body = blocks(inner) if inner else text
                shown = (
                    f"{printable(title)}:\n\n{body}" if opened else f"{printable(title)} {_FOLDED}"
                )
            case _:
                continue
        parts.append(shown)
    return "\n\n".join(parts)


def _item(name: str, text: str, below: Iterable[str]) -> str:
    first = printable(f"{name}: {text}" if name else text)
    return "\n".join([f"- {first}", *(f"    {printable(line)}" for line in below)])


def table(data: Table) -> str:
    """The table with a rule under its head, and what the marks before its rows mean."""
    width = _width_of_terminal.get()
    text = _fitted(data, width) if width is not None else None
    return "\n".join([text or _plain(data), *_legend(data)])


def _legend(data: Table) -> list[str]:
    used = {row.kind for row in data.rows}
    known = {"reference": "the reference", "bad": data.bad, "unsteady": _UNSTEADY}
    meanings = [f"{_MARKS[kind]} {text}" for kind, text in known.items() if kind in used]
    return ["", ";  ".join(meanings)] if meanings else []


def _fitted(data: Table, width: int) -> str | None:
    """By `rich`: texts wrap between words, and within them where there is no other way.

    None where not even that fits: then lines are as long as they are.
    """
    indices = range(len(data.columns))
    needed = [_needed(data, index) for index in indices]
    if sum(needed) + 2 * len(needed) + 2 > width:
        texts = [data.columns[index].align == "left" for index in indices]
        folded = [
            min(one, _NARROWEST_TEXT) if text else one
            for one, text in zip(needed, texts, strict=True)
        ]
        if sum(folded) + 2 * len(folded) + 2 > width:
            return None
        needed = folded
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table as RichTable
    from rich.text import Text

    drawn = RichTable(box=SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 1, 0, 0))
    drawn.add_column("", width=1)
    for column, least in zip(data.columns, needed, strict=True):
        drawn.add_column(
            Text(printable(column.title)),
            justify=column.align,
            min_width=least,
            overflow="fold",
        )
    for row in data.rows:
        drawn.add_row(_MARKS[row.kind], *(Text(printable(cell)) for cell in row.cells))
    stream = io.StringIO()
    Console(file=stream, width=width, color_system=None, highlight=False).print(drawn)
    return "\n".join(line.rstrip() for line in stream.getvalue().rstrip().split("\n"))


def _needed(data: Table, index: int) -> int:
    """Columns of the terminal that a column cannot do without: its numbers, its longest word."""
    column = data.columns[index]
    cells = [printable(row.cells[index]) for row in data.rows]
    whole = cells if column.align == "right" else [word for cell in cells for word in cell.split()]
    return max(map(_width, [*whole, *column.title.split(), " "]))


def _plain(data: Table) -> str:
    grid = [[printable(cell) for cell in row.cells] for row in data.rows]
    aligns = [column.align for column in data.columns]
    # A title breaks into lines rather than making its column wider than numbers need.
    titles: list[list[str]] = []
    for index, column in enumerate(data.columns):
        needed = max((_width(cells[index]) for cells in grid), default=0)
        longest_word = max(map(_width, column.title.split()), default=0)
        titles.append(wrap(column.title, max(needed, longest_word, 1)) or [""])
    widths = [
        max(_width(text) for text in [*title, *(cells[index] for cells in grid)])
        for index, title in enumerate(titles)
    ]
    height = max((len(title) for title in titles), default=1)
    padded = [[""] * (height - len(title)) + title for title in titles]
    lines = ["  " + _line(list(words), widths, aligns) for words in zip(*padded, strict=True)]
    lines.append("  " + "  ".join("-" * width for width in widths))
    for row, cells in zip(data.rows, grid, strict=True):
        lines.append(f"{_MARKS[row.kind]} " + _line(cells, widths, aligns))
    return "\n".join(line.rstrip() for line in lines)


def _line(cells: list[str], widths: list[int], aligns: list[Align]) -> str:
    return "  ".join(_padded(*item) for item in zip(cells, widths, aligns, strict=True))


def _padded(text: str, width: int, align: Align) -> str:
    fill = " " * (width - _width(text))
    return text + fill if align == "left" else fill + text


def _width(text: str) -> int:
    """Columns that a terminal uses: wide East Asian characters take two, combining ones none."""
    return sum(
        0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1
        for c in text
    )
