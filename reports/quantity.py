"""Moved to reports/renderers; this name goes with its last reader."""

from reports.renderers.quantity import MISSING, binary_bytes, counted, difference

__all__ = ["MISSING", "binary_bytes", "counted", "difference"]
