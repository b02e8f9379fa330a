"""Measurements of the project itself: commands, run as `python -m benchmarks.NAME`."""
