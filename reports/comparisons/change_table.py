"""Changes against a base as a table; used by the comparison's text and by reports."""

from __future__ import annotations

from collections.abc import Sequence

from reports.comparisons.change import Change, other_metrics
from reports.renderers import quantity
from reports.renderers.table import Column, Row, Table


def change_table(changes: Sequence[Change], labels: Sequence[str] | None = None) -> Table:
    """One row per change, named by `labels` or by its head cell."""
    columns = (
        Column("cell", "left"),
        Column("time change"),
        Column("throughput change"),
        Column("throughput ratio"),
        Column("memory change"),
        Column("memory metric", "left"),
        *(Column(f"{metric.title} change") for metric in other_metrics()),
        Column("final loss difference"),
        Column("runs", "left"),
    )
    names = [change.head.name for change in changes] if labels is None else labels
    rows = [_row(change, name) for change, name in zip(changes, names, strict=True)]
    return Table(columns, tuple(rows))


def _row(change: Change, name: str) -> Row:
    texts = (
        name,
        quantity.change(change.time_change),
        quantity.change(change.throughput_change),
        quantity.ratio(change.throughput_ratio),
        quantity.change(change.memory_change),
        change.memory_metric.title if change.memory_metric else quantity.MISSING,
        *(quantity.change(value) for value in change.others.values()),
        quantity.signed_difference(change.loss_difference),
        change.sample_note,
    )
    return Row(texts)
