"""Text, tables and quantities as a reader sees them; text from records is shown literally."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from recorded_runs import quickstart_cells, recorded_cell

from bench.derive.metrics import LOSS, STEP_TIME, THROUGHPUT
from reports.renderers import markdown, quantity, terminal
from reports.renderers.printable import printable
from reports.renderers.render import breakable
from reports.renderers.table import Row, Table, folded
from reports.sections.cell_table import best_cells

HOSTILE = [
    "<script>alert(1)</script>",
    "a|b|c",
    "**bold** _em_ `code` ~~gone~~",
    "[text](http://evil.example/x)",
    "![img](x)",
    "&lt; &amp;",
    "@someone #123",
    "\\* \\\\",
    "line\nbreak\r\nand\ttab",
    "\x1b[31mred\x1b[0m\x07",
    "\u202egnp.exe",
    "$x$ {{ 7 * 7 }} {% raw %}",
    "https://evil.example www.evil.example",
    "- item",
    "1. item",
    "# heading",
    "> quote",
    "optim_grads_params",
]


def rendered_text(source):
    """Inline text as a CommonMark reader with GitHub's extras would show it; fails on markup."""
    tokens = MarkdownIt("gfm-like", {"linkify": False}).enable("table").parse(source)
    texts = []
    for token in tokens:
        for child in token.children or []:
            assert child.type in ("text", "text_special", "softbreak"), (source, child)
            texts.append(child.content)
        assert token.type in ("paragraph_open", "paragraph_close", "inline"), (source, token)
    return "".join(texts)


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_text_reads_back_as_itself(text):
    # Values never start a line of their own: they follow a word, a bullet or a bar.
    assert rendered_text("x " + markdown.escape(text)) == ("x " + printable(text)).rstrip()


@given(st.text(max_size=60))
def test_any_text_reads_back_as_itself(text):
    shown = rendered_text("x" + markdown.escape(text) + "x")
    assert re.sub(r"\s+", " ", shown) == re.sub(r"\s+", " ", "x" + printable(text) + "x")


@given(st.lists(st.text(max_size=20), min_size=2, max_size=2))
def test_any_text_stays_in_its_table_cell(cells):
    table = Table.of(("first", "second"), (Row(tuple(cells)),))
    tokens = MarkdownIt("gfm-like", {"linkify": False}).parse(markdown.table(table))
    bodies = [t for t in tokens if t.type == "td_open"]
    assert len(bodies) == 2
    assert "html_inline" not in {c.type for t in tokens for c in t.children or []}


@pytest.mark.parametrize("text", ["```\nend", "````", "no fence", "`", "a\n```json\n```\n"])
def test_a_code_block_cannot_be_left_from_inside(text):
    tokens = MarkdownIt().parse(markdown.code_block(text, "json"))
    assert [token.type for token in tokens] == ["fence"]
    assert tokens[0].content == text + "\n"


@given(st.text(max_size=60), st.integers(1, 30))
def test_a_printable_text_is_one_harmless_line_of_the_asked_length(text, limit):
    shown = printable(text, limit)
    assert len(shown) <= limit
    assert len(shown.splitlines()) <= 1
    assert all(character.isprintable() for character in shown)


def test_a_terminal_shows_columns_aligned_and_no_control_character():
    texts = [*HOSTILE, "模型", "a\x1b[31m\u202eb"]
    _, _, *rows = terminal.table(
        Table.of(("name", "n"), tuple(Row((text, "1")) for text in texts))
    ).splitlines()
    assert len(rows) == len(texts)
    assert "\x1b" not in "".join(rows)
    assert rows[-1].split() == ["a\ufffd[31m\ufffdb", "1"]
    assert len(rows[-2]) == len(rows[-1]) - 2, "each of its characters is two columns wide"
    with pytest.raises(ValueError, match="1 cells for 2 columns"):
        Table.of(("a", "b"), (Row(("x",)),))


def test_a_long_title_breaks_into_lines_instead_of_widening_its_column():
    table = Table.of(("cell", "throughput change"), (Row(("a", "+4.8 %")),))
    assert terminal.table(table).splitlines() == [
        "        throughput",
        "  cell      change",
        "  ----  ----------",
        "  a         +4.8 %",
    ]


@pytest.fixture
def terminal_of():
    """Tables fit into that many columns until the test ends."""
    set_before = terminal._width_of_terminal.get()
    yield terminal.show_on_terminal
    terminal._width_of_terminal.set(set_before)


WIDE = Table.of(
    "cell | state per rank | tokens/s | reason",
    [
        (f"mfsdp-optim_grads_params-{name}", f"{n}26.1 MiB", f"{n},234.5", "none")
        for n, name in enumerate(("fp32", "bf16"), start=1)
    ],
)


def test_no_number_is_cut_and_no_line_is_too_long_whatever_the_terminal(terminal_of):
    wide = terminal.table(WIDE)
    for width in range(20, 130, 3):
        terminal_of(width)
        text = terminal.table(WIDE)
        for row in WIDE.rows:
            assert all(number in text for number in row.cells[1:3])
        assert text == wide or max(map(len, text.splitlines())) <= width


def test_texts_wrap_between_words_before_names_are_cut(terminal_of):
    reason = "needs 8 CUDA devices and this machine shows none"
    table = Table.of(("cell", "reason"), (Row(("mfsdp-optim_grads-fp32", reason)),), left=2)
    terminal_of(60)
    text = terminal.table(table)
    assert "mfsdp-optim_grads-fp32" in text
    assert len(text.splitlines()) == 4
    terminal_of(35)
    assert "mfsdp-optim_gr" in terminal.table(table)


def test_marks_are_explained_below_a_table_that_has_them():
    rows = (Row(("a",), "bad"), Row(("b",), "unsteady"), Row(("c",)))
    text = terminal.table(Table.of(("cell",), rows))
    assert text.splitlines()[2:] == [
        "! a",
        "~ b",
        "  c",
        "",
        "! failed or not met;  ~ undecided, not steady or not measured",
    ]
    assert ";" not in terminal.table(Table.of(("cell",), rows[2:]))


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (quantity.significant(10925.4), "10,925"),
        (quantity.significant(0.0432109), "0.04321"),
        (quantity.significant(1.5e-9), "1.500e-09"),
        (quantity.significant(0.0), "0"),
        (quantity.significant(None), "-"),
        (quantity.significant(float("nan")), "-"),
        (quantity.change(-0.0459), "-4.6 %"),
        (quantity.change(0.0484), "+4.8 %"),
        (quantity.change(-0.00001), "0.0 %"),
        (quantity.change(None), "-"),
        (quantity.ratio(1.2897), "1.290x"),
        (quantity.share(0.624), "62.4 %"),
        (quantity.loss(2.3056914), "2.305691"),
        (quantity.difference(0.0), "0"),
        (quantity.difference(3.21e-6), "3.2e-06"),
        (quantity.difference(-3.21e-6, signed=True), "-3.2e-06"),
        (quantity.binary_bytes(0), "0 B"),
        (quantity.binary_bytes(1023), "1023 B"),
        (quantity.binary_bytes(1536), "1.5 KiB"),
        (quantity.binary_bytes(23425.69 * 2**20), "22.9 GiB"),
        (quantity.counted(1, "cell"), "1 cell"),
        (quantity.counted(2, "cell"), "2 cells"),
    ],
)
def test_quantities_are_written_with_their_unit(shown, expected):
    assert shown == expected


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("mfsdp-optim_grads", "mfsdp-<wbr>optim_<wbr>grads"),
        ("plain", "plain"),
        ("-12.0 %", "-<wbr>12.0 %"),
        ("end-", "end-"),
        ("<script>a-b</script>", "&lt;script&gt;a-<wbr>b&lt;/script&gt;"),
        ("a&lt;-b", "a&amp;lt;-<wbr>b"),
    ],
)
def test_a_name_may_be_broken_at_its_joints_and_stays_escaped(text: str, shown: str) -> None:
    assert str(breakable(text)) == shown


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
    assert "| **fast** |" in markdown.table(table)
    # Names are kept where all are alike, and a table of one row keeps its columns.
    alike = Table.of(("cell", "n"), (Row(("a", "1")), Row(("a", "1"))))
    assert [column.title for column in folded(alike)[0].columns] == ["cell"]
    single = Table.of(("cell", "n"), (Row(("a", "1")),))
    assert folded(single) == (single, "")


def test_the_best_is_the_lowest_time_and_the_highest_throughput_and_no_loss(store):
    cells = [
        recorded_cell(store, name, resolved, milliseconds=lambda _, ms=100.0 / speed: ms)
        for (name, resolved), speed in zip(quickstart_cells()[:3], (1.0, 2.0, 0.5), strict=True)
    ]
    assert best_cells(cells, STEP_TIME) == [1]
    assert best_cells(cells, THROUGHPUT) == [1]
    assert best_cells(cells, LOSS) == []
