"""Moved to reports/renderers; this name goes with its last reader."""

from reports.renderers.table import Row, Table, columns

__all__ = ["Row", "Table", "columns"]
