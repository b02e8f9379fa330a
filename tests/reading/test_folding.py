"""Constant columns become one line; the best of a column is set off."""

from __future__ import annotations

from recorded_runs import quickstart_cells, recorded_cell

from bench.derive.metrics import LOSS, STEP_TIME, THROUGHPUT
from reports.renderers import markdown
from reports.renderers.table import Row, Table, folded
from reports.sections.cell_table import best_cells


def test_a_column_that_says_the_same_everywhere_is_said_once():
    rows = (
        Row(("a", "1", "fast", "x"), best=frozenset({2, 3})),
        Row(("b", "1", "slow", "x"), "bad"),
    )
    table, said = folded(Table.of(("cell", "n", "speed", "unit"), rows))
    assert said == "n: 1; unit: x"
    assert [column.title for column in table.columns] == ["cell", "speed"]
    assert [row.cells for row in table.rows] == [("a", "fast"), ("b", "slow")]
    assert [row.best for row in table.rows] == [frozenset({1}), frozenset()]
    assert table.rows[1].kind == "bad"


def test_a_table_of_one_row_keeps_its_columns():
    table = Table.of(("cell", "n"), (Row(("a", "1")),))
    assert folded(table) == (table, "")


def test_names_are_kept_even_where_all_are_alike():
    table = Table.of(("cell", "n"), (Row(("a", "1")), Row(("a", "1"))))
    assert [column.title for column in folded(table)[0].columns] == ["cell"]


def test_the_best_is_the_lowest_time_and_the_highest_throughput_and_no_loss(store):
    cells = [
        recorded_cell(store, name, resolved, milliseconds=lambda _, ms=100.0 / speed: ms)
        for (name, resolved), speed in zip(quickstart_cells()[:3], (1.0, 2.0, 0.5), strict=True)
    ]
    assert best_cells(cells, STEP_TIME) == [1]
    assert best_cells(cells, THROUGHPUT) == [1]
    assert best_cells(cells, LOSS) == []


def test_the_best_is_bold_in_markdown():
    table = Table.of(("cell", "ms"), (Row(("a", "1"), best=frozenset({1})), Row(("b", "2"))))
    assert "| **1** |" in markdown.table(table)
