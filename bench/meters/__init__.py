"""Meters: what is read beside the clock. Each is read between steps, outside the timed interval."""
