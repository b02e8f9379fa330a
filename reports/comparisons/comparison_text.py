"""A comparison for a terminal, as Markdown, and as plain data for JSON."""

from __future__ import annotations

from typing import Any

from bench.derive.metrics import STEP_TIME
from reports.comparisons.change import Change, change_table
from reports.comparisons.compare import Comparison
from reports.renderers import markdown, terminal
from reports.renderers.printable import printable

DEFINITIONS = (
    "time change: head step time / base step time - 1; throughput change: head tokens/s / base "
    "tokens/s - 1; throughput ratio: head tokens/s / base tokens/s (of collectives: bus bandwidth)"
)


def to_terminal(comparison: Comparison) -> str:
    """Aligned plain text."""
    head = printable(f"{comparison.head} (head) against {comparison.base} (base)")
    table = terminal.table(change_table(comparison.changes, comparison.labels))
    lines = [head, "", table, "", DEFINITIONS]
    lines += [printable(f"{title}: {text}") for title, text in _remarks(comparison)]
    return "\n".join(lines) + "\n"


def to_markdown(comparison: Comparison) -> str:
    """A GitHub table with its remarks."""
    head = f"**{markdown.escape(comparison.head)}** against **{markdown.escape(comparison.base)}**"
    table = markdown.table(change_table(comparison.changes, comparison.labels))
    remarks = [
        f"- {title}: {markdown.escape(text)}"
        for title, text in [("definitions", DEFINITIONS), *_remarks(comparison)]
    ]
    return "\n\n".join([head, table, "\n".join(remarks)]) + "\n"


def to_data(comparison: Comparison) -> dict[str, Any]:
    """Plain data; fractions, not per cent; null where a side has no number."""
    pairs = zip(comparison.labels, comparison.changes, strict=True)
    return {
        "base": comparison.base,
        "head": comparison.head,
        "changes": [_change(label, change) for label, change in pairs],
        "not_comparable": [
            {"cell": name, "reason": reason} for name, reason in comparison.not_comparable
        ],
        "unmatched_base": list(comparison.unmatched_base),
        "unmatched_head": list(comparison.unmatched_head),
        "set_aside": list(comparison.set_aside),
        "differences": list(comparison.differences),
    }


def _change(label: str, change: Change) -> dict[str, Any]:
    return {
        "cell": label,
        "base_cell": change.base.name,
        "head_cell": change.head.name,
        "base_n": change.base.n,
        "head_n": change.head.n,
        "base_step_milliseconds": change.base.value(STEP_TIME),
        "head_step_milliseconds": change.head.value(STEP_TIME),
        "time_change": change.time_change,
        "throughput_change": change.throughput_change,
        "throughput_ratio": change.throughput_ratio,
        "memory_metric": change.memory_metric.name if change.memory_metric else None,
        "memory_change": change.memory_change,
        **{f"{name}_change": value for name, value in change.others.items()},
        "final_loss_difference": change.loss_difference,
        "note": change.sample_note,
    }


def _remarks(comparison: Comparison) -> list[tuple[str, str]]:
    remarks = [("not comparable", f"{name}: {why}") for name, why in comparison.not_comparable]
    if comparison.unmatched_base:
        remarks.append(("only in base", ", ".join(comparison.unmatched_base)))
    if comparison.unmatched_head:
        remarks.append(("only in head", ", ".join(comparison.unmatched_head)))
    if comparison.differences:
        remarks.append(("differs in (base, head)", "; ".join(comparison.differences)))
    elif comparison.set_aside:
        remarks.append(("set aside when matching", ", ".join(comparison.set_aside)))
    if any(min(change.base.n, change.head.n) == 1 for change in comparison.changes):
        remarks.append(("n=1", "one run on a side: no interval, no verdict"))
    return remarks
