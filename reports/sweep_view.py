"""Moved to reports/views; this name goes with its last reader."""

from reports.views.sweep_view import load_sweeps

__all__ = ["load_sweeps"]
