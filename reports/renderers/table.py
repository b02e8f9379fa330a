"""A table as data: plain text in rows and columns, escaped only by whoever renders it."""

from __future__ import annotations

from dataclasses import dataclass
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

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row.cells) != len(self.columns):
                raise ValueError(f"{len(row.cells)} cells for {len(self.columns)} columns: {row}")


def columns(*titles: str, left: int = 1) -> tuple[Column, ...]:
    """Columns with these titles, the first `left` of them aligned left (names before numbers)."""
    return tuple(
        Column(title, "left" if index < left else "right") for index, title in enumerate(titles)
    )
