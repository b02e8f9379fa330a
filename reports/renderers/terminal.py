"""Tables for a terminal or a log file: aligned plain text, no colour, no control characters."""

from __future__ import annotations

import unicodedata
from textwrap import wrap

from reports.renderers.printable import printable
from reports.renderers.table import Align, Table

_MARKS = {"plain": " ", "reference": "*", "bad": "!", "unsteady": "~"}


def table(data: Table) -> str:
    """The table with a rule under its head; `*` reference, `!` bad, `~` not steady."""
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
