"""Meters: what is read besides the clock, between steps, outside the timed interval."""
