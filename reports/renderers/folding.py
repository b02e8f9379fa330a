"""Columns that say the same in every row become one line above the table."""

from __future__ import annotations

from dataclasses import replace

from reports.renderers.table import Row, Table


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
