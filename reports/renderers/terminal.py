"""Tables for a terminal or a log file: aligned text without control characters.

A terminal is so many columns wide, and long texts wrap inside their column. A file or a pipe gets
one line per row, as long as it needs to be.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextvars import ContextVar
from itertools import zip_longest

from rich.cells import cell_len

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
from reports.renderers.table import RowKind, Table

_MARKS: dict[RowKind, str] = {"plain": " ", "reference": "*", "bad": "!", "unsteady": "~"}
_FOLDED = "(folded; Markdown and JSON have them)"
_UNSTEADY = "undecided, not steady or not measured"

_NARROWEST_TEXT = 16

_width_of_terminal: ContextVar[int | None] = ContextVar("width_of_terminal", default=None)


def show_on_terminal(width: int) -> None:
    """From now on tables fit into `width` columns, where their numbers can."""
    _width_of_terminal.set(width)


def blocks(of: Iterable[Block]) -> str:
    """Blocks with an empty line between them; figures are left out."""
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
            case Details(title, title_alone=True):
                shown = f"{printable(title)} {_FOLDED}"
            case Details(title, text, inner):
                shown = f"{printable(title)}:\n\n{blocks(inner) if inner else text}"
            case _:
                continue
        parts.append(shown)
    return "\n\n".join(parts)


def _item(name: str, text: str, below: Iterable[str]) -> str:
    first = printable(f"{name}: {text}" if name else text)
    return "\n".join([f"- {first}", *(f"    {printable(line)}" for line in below)])


def table(data: Table) -> str:
    """The table with a rule under its head, and what the marks before its rows mean."""
    titles = [printable(column.title) for column in data.columns]
    grid = [[printable(cell) for cell in row.cells] for row in data.rows]
    # A title breaks into lines rather than making its column wider than numbers need.
    widths = _fitted(
        data, [[*title.split(), *(row[at] for row in grid)] for at, title in enumerate(titles)]
    )
    head = [_wrapped(title, width) for title, width in zip(titles, widths, strict=True)]
    height = max(map(len, head), default=1)
    lines = [*_lines(" ", [[""] * (height - len(title)) + title for title in head], widths, data)]
    lines.append("  " + "  ".join("-" * width for width in widths))
    for row, cells in zip(data.rows, grid, strict=True):
        wrapped = [_wrapped(cell, width) for cell, width in zip(cells, widths, strict=True)]
        lines += _lines(_MARKS[row.kind], wrapped, widths, data)
    used = {row.kind for row in data.rows}
    known = {"reference": "the reference", "bad": data.bad, "unsteady": _UNSTEADY}
    meanings = [f"{_MARKS[kind]} {text}" for kind, text in known.items() if kind in used]
    return "\n".join([*lines, *(["", ";  ".join(meanings)] if meanings else [])])


def _lines(
    mark: str, cells: Sequence[Sequence[str]], widths: Sequence[int], data: Table
) -> Iterator[str]:
    """Lines of one row whose cells have several each; the mark stands before the first."""
    for number, texts in enumerate(zip_longest(*cells, fillvalue="")):
        padded = []
        for text, width, column in zip(texts, widths, data.columns, strict=True):
            fill = " " * (width - cell_len(text))
            padded.append(text + fill if column.align == "left" else fill + text)
        yield f"{' ' if number else mark} {'  '.join(padded)}".rstrip()


def _wrapped(text: str, width: int) -> list[str]:
    """Lines of at most `width`: broken between words, and within one where it is longer."""
    if cell_len(text) <= width:
        return [text]
    from rich.console import Console
    from rich.text import Text

    lines = Text(text).wrap(Console(width=width), width, overflow="fold")
    return [line.plain.rstrip() for line in lines]


def _fitted(data: Table, columns: Sequence[Sequence[str]]) -> list[int]:
    """A width for each column of texts, none of which may wrap in a column of numbers.

    All that is needed where it fits or no terminal is requested, or where nothing helps; else texts
    wrap between words, and within them where there is no other way.
    """
    room = _width_of_terminal.get()
    needed = [max(map(cell_len, [*texts, ""])) for texts in columns]
    words = [
        max(cell_len(word) for text in [*texts, " x"] for word in text.split()) for texts in columns
    ]
    for longest in (max(words, default=0), _NARROWEST_TEXT):
        least = [
            min(word, longest) if column.align == "left" else all_of_it
            for word, all_of_it, column in zip(words, needed, data.columns, strict=True)
        ]
        fitted = list(needed)
        while room is not None and sum(fitted) + 2 * len(fitted) > room and fitted != least:
            wider = [at for at, width in enumerate(fitted) if width > least[at]]
            fitted[max(wider, key=fitted.__getitem__)] -= 1
        if room is None or sum(fitted) + 2 * len(fitted) <= room:
            return fitted
    return needed
