"""Moved to reports/views; this name goes with its last reader."""

from reports.views.cells import Cell

__all__ = ["Cell"]
