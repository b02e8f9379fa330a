"""Spans of time, as people write and read them."""

from __future__ import annotations

import re

from bench.errors import UsageError

_MINUTE = 60
_HOUR = 3600
_SPAN = re.compile(r"(?:(\d+)\s*h)?\s*(?:(\d+)\s*m(?:in)?)?\s*(?:(\d+)\s*s)?")


def duration(seconds: float) -> str:
    """A span of time for people: `48 s`, `3 min 20 s`, `2 h 5 min`."""
    whole = round(seconds)
    if whole < _MINUTE:
        return f"{whole} s"
    if whole < _HOUR:
        minutes, rest = divmod(whole, _MINUTE)
        return f"{minutes} min {rest} s" if rest else f"{minutes} min"
    hours, minutes = divmod(round(seconds / _MINUTE), _MINUTE)
    return f"{hours} h {minutes} min" if minutes else f"{hours} h"


def parsed_seconds(text: str, option: str) -> float:
    """Seconds of `10m`, `90s`, `1h30m`.

    Raises:
        UsageError: anything else, or no time at all.
    """
    found = _SPAN.fullmatch(text.strip())
    hours, minutes, seconds = (int(part or 0) for part in (found.groups() if found else (0, 0, 0)))
    total = float(hours * _HOUR + minutes * _MINUTE + seconds)
    if total <= 0:
        raise UsageError(f"{option}: expected a time such as 10m, 90s or 1h30m, found {text!r}")
    return total
