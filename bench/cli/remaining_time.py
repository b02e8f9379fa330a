"""How long a sweep will still take: arithmetic on what has been seen, no clock of its own."""

from __future__ import annotations

import re
from statistics import mean

from bench.errors import UsageError

_MINUTE = 60
_HOUR = 3600
_FEWEST_STEPS = 2
_SPAN = re.compile(r"(?:(\d+)\s*h)?\s*(?:(\d+)\s*m(?:in)?)?\s*(?:(\d+)\s*s)?")


class RemainingTime:
    """An estimate that gets better with every run that ends.

    The current run needs its remaining steps. Each later run needs as long as runs of the same cell
    took in this call, else as the mean run, else as the current run promises to take.
    """

    def __init__(self) -> None:
        self._took_seconds: dict[str, list[float]] = {}
        self._cell = ""
        self._steps = 0
        self._later_runs = 0

    def run_started(self, cell: str, steps: int, later_runs: int) -> None:
        """A run of `cell` begins; `later_runs` are to follow it."""
        self._cell, self._steps, self._later_runs = cell, steps, later_runs

    def run_ended(self, seconds: float) -> None:
        """The run took so long, start and end included."""
        self._took_seconds.setdefault(self._cell, []).append(seconds)

    def of_run(self, elapsed: float, step: int, milliseconds: float | None) -> float | None:
        """Seconds that the current run still needs, None while nothing tells.

        Args:
            elapsed: seconds since it was started.
            step: steps that it has finished.
            milliseconds: of one of its steps.
        """
        if milliseconds is not None and step >= _FEWEST_STEPS:
            return max(0, self._steps - step) * milliseconds / 1e3
        usual = self._usual(self._cell)
        return None if usual is None else max(0.0, usual - elapsed)

    def of_sweep(self, elapsed: float, step: int, milliseconds: float | None) -> float | None:
        """Seconds until the last run ends, None while nothing tells; arguments as `of_run`."""
        rest = self.of_run(elapsed, step, milliseconds)
        if rest is None:
            return None
        usual = self._usual(None)
        return rest + self._later_runs * (elapsed + rest if usual is None else usual)

    def _usual(self, cell: str | None) -> float | None:
        took = self._took_seconds.get(cell or "")
        took = took or [one for runs in self._took_seconds.values() for one in runs]
        return mean(took) if took else None


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
