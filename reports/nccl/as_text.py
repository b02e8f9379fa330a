"""The audit for a terminal and for a pull request."""

from __future__ import annotations

from collections.abc import Sequence

from reports.nccl.audit import Audit
from reports.nccl.presentation import (
    bytes_table,
    reading_facts,
    reason_lines,
    results_table,
    rows_table,
)
from reports.nccl.requirement import Result
from reports.renderers import terminal
from reports.renderers.printable import printable
from reports.renderers.table import Table

_MOST_ROWS = 400
_LONGEST_DETAIL = 400


def to_terminal(audit: Audit, results: Sequence[Result] = ()) -> str:
    """Tables and sentences as plain text."""
    parts = ["\n".join(printable(text, _LONGEST_DETAIL) for text in reading_facts(audit))]
    if audit.rows:
        parts.append(_limited(rows_table(audit)))
        parts.append("Bytes by verdict (calls x bytes)\n" + terminal.table(bytes_table(audit)))
    reasons = reason_lines(audit)
    if reasons:
        lines = ["Why not symmetric"]
        for one in reasons:
            lines.append(f"- {printable(one.title)}: {printable(one.text)}")
            lines += [f"    {printable(text, _LONGEST_DETAIL)}" for text in one.details]
        parts.append("\n".join(lines))
    if audit.hints:
        lines = ["What the lines suggest (no verdict rests on this)"]
        parts.append("\n".join([*lines, *(f"- {printable(text)}" for text in audit.hints)]))
    if results:
        parts.append("Requirements\n" + terminal.table(results_table(results)))
    return "\n\n".join(parts)


def _limited(table: Table) -> str:
    if len(table.rows) <= _MOST_ROWS:
        return terminal.table(table)
    text = terminal.table(Table(table.columns, table.rows[:_MOST_ROWS]))
    return f"{text}\n  ... {len(table.rows) - _MOST_ROWS} more rows; --format json holds all"


def to_markdown(audit: Audit, results: Sequence[Result] = ()) -> str:
    """The same for a pull request."""
    parts = ["## NCCL audit"]
    if results:
        parts += ["### Requirements", _markdown_table(results_table(results))]
    if audit.rows:
        limited = rows_table(audit)
        parts += [
            "### Verdicts",
            _markdown_table(Table(limited.columns, limited.rows[:_MOST_ROWS])),
        ]
        if len(limited.rows) > _MOST_ROWS:
            parts.append(f"{len(limited.rows) - _MOST_ROWS} more rows are left out.")
        parts += ["### Bytes by verdict", _markdown_table(bytes_table(audit))]
    reasons = reason_lines(audit)
    if reasons:
        parts.append("### Why not symmetric")
        parts.append("\n".join(_markdown_reason(r.title, r.text, r.details) for r in reasons))
    if audit.hints:
        parts.append("### What the lines suggest (no verdict rests on this)")
        parts.append("\n".join(f"- {_escaped(text)}" for text in audit.hints))
    parts.append("### Reading")
    parts.append("\n".join(f"- {_escaped(text)}" for text in reading_facts(audit)))
    return "\n\n".join(parts) + "\n"


def _markdown_reason(title: str, text: str, details: Sequence[str]) -> str:
    lines = [f"- **{_escaped(title)}**: {_escaped(text)}"]
    lines += [f"  - {_escaped(detail)}" for detail in details]
    return "\n".join(lines)


def _markdown_table(table: Table) -> str:
    head = "| " + " | ".join(_escaped(column.title) for column in table.columns) + " |"
    rule = "|" + "|".join("---:" if c.align == "right" else "---" for c in table.columns) + "|"
    body = ["| " + " | ".join(_escaped(cell) for cell in row.cells) + " |" for row in table.rows]
    return "\n".join([head, rule, *body])


def _escaped(text: str) -> str:
    """Text from a log can hold anything, Markdown and HTML included."""
    shown = printable(text, _LONGEST_DETAIL)
    for character in "\\`*_[]<>|#~":
        shown = shown.replace(character, "\\" + character)
    return shown.replace("&", "&amp;").replace("\\<", "&lt;").replace("\\>", "&gt;")
