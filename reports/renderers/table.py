"""A table as data: plain text in rows and columns, escaped only by whoever renders it.

`folded` makes one line above the table of columns that say the same in every row.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

Align = Literal["left", "right"]
RowKind = Literal["plain", "reference", "bad", "unsteady"]


@dataclass(frozen=True)
class Column:
    """A heading; numbers align right. The unit belongs into the title."""

    title: str
    align: Align = "right"


@dataclass(frozen=True)
class Row:
    """One text per column; `kind` lets a renderer set the row off.

    best: columns in which no other row is better.
    """

    cells: tuple[str, ...]
    kind: RowKind = "plain"
    best: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Table:
    """Rows as long as there are columns (checked). bad: what rows of that kind are."""

    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    bad: str = "failed or not met"

    @classmethod
    def of(
        cls, titles: str | Sequence[str], rows: Iterable[Row | tuple[str, ...]], *, left: int = 1
    ) -> Table:
        """Rows below `titles`, one by one or as one text, `cell | step (ms) | <runs`.

        The first `left` columns align left: names stand before numbers. In a text, so does one
        behind a `<`.
        """
        if isinstance(titles, str):
            words = titles.split(" | ")
            marked = [at for at, word in enumerate(words) if at < left or word.startswith("<")]
            titles = [word.removeprefix("<") for word in words]
        else:
            marked = list(range(left))
        columns = (
            Column(title, "left" if at in marked else "right") for at, title in enumerate(titles)
        )
        return cls(tuple(columns), tuple(r if isinstance(r, Row) else Row(r) for r in rows))

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row.cells) != len(self.columns):
                raise ValueError(f"{len(row.cells)} cells for {len(self.columns)} columns: {row}")


def folded(table: Table) -> tuple[Table, str]:
    """The table without its constant columns, and what they say, as `n: 1; MFU: unknown device`.

    The first column names the rows and stays, and so does every column of a table of one row. The
    text is empty where nothing was folded.
    """
    if len(table.rows) <= 1:
        return table, ""
    constant = [
        index
        for index in range(1, len(table.columns))
        if len({row.cells[index] for row in table.rows}) == 1
    ]
    kept = [index for index in range(len(table.columns)) if index not in constant]
    said = "; ".join(f"{table.columns[i].title}: {table.rows[0].cells[i]}" for i in constant)
    rows = tuple(_row(row, kept) for row in table.rows)
    return Table(tuple(table.columns[index] for index in kept), rows), said


def _row(row: Row, kept: list[int]) -> Row:
    cells = tuple(row.cells[index] for index in kept)
    best = frozenset(at for at, index in enumerate(kept) if index in row.best)
    return replace(row, cells=cells, best=best)
