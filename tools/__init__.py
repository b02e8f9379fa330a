"""Programs of the developers, run as `python -m tools.NAME`; they are not installed."""
