"""Changes as table rows: the three numbers of speed together, then memory, bytes and loss."""

from __future__ import annotations

from collections.abc import Sequence

from reports.comparisons.change import MEMORY_TITLES, Change
from reports.renderers import quantity
from reports.renderers.table import Column, Row, Table

_COLUMNS = (
    Column("cell", "left"),
    Column("time change"),
    Column("throughput change"),
    Column("throughput ratio"),
    Column("memory change"),
    Column("memory metric", "left"),
    Column("bytes sent change"),
    Column("final loss difference"),
    Column("runs", "left"),
)


def change_table(changes: Sequence[Change], labels: Sequence[str] | None = None) -> Table:
    """One row per change, named by `labels` or by its head cell."""
    names = [change.head.name for change in changes] if labels is None else labels
    rows = [_row(change, name) for change, name in zip(changes, names, strict=True)]
    return Table(_COLUMNS, tuple(rows))


def _row(change: Change, name: str) -> Row:
    metric = change.memory_metric
    loss = change.loss_difference
    texts = (
        name,
        quantity.change(change.time_change),
        quantity.change(change.throughput_change),
        quantity.ratio(change.throughput_ratio),
        quantity.change(change.memory_change),
        MEMORY_TITLES[metric] if metric else quantity.MISSING,
        quantity.change(change.wire_bytes_change),
        quantity.signed_difference(loss),
        change.sample_note,
    )
    return Row(texts)
