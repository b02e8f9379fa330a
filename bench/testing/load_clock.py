"""A clock for time limits that runs slower on a busy machine, so that load is no hang.

A second counts as the share of it that a runnable process got: with 6 runnable processes on 2 cores
a third. A process that waits for another one that never answers is not runnable, so a real hang on
an idle machine still ends on time, and on a busy one at most `_SLOWEST` times later.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

_SLOWEST = 8.0
_LOAD = Path("/proc/loadavg")


def runnable_processes() -> int:
    """Processes and threads that run or could run now; 1 where the kernel does not say."""
    try:
        return int(_LOAD.read_text(encoding="utf-8").split()[3].partition("/")[0])
    except (OSError, IndexError, ValueError):
        return 1


def stretched(
    seconds: float, runnable: Callable[[], int] = runnable_processes, cores: int | None = None
) -> float:
    """What `seconds` of an idle machine may take here now; for limits that others watch."""
    return seconds / max(_share(runnable, cores or _own_cores()), 1 / _SLOWEST)


def _share(runnable: Callable[[], int], cores: int) -> float:
    """Of a second that a runnable process gets."""
    return min(1.0, cores / max(1, runnable()))


def _own_cores() -> int:
    return len(os.sched_getaffinity(0))


class LoadClock:
    """Seconds since it was made, each weighted by how much of the machine one process gets."""

    def __init__(
        self,
        now: Callable[[], float] = time.monotonic,
        runnable: Callable[[], int] = runnable_processes,
        cores: int | None = None,
    ) -> None:
        self._now = now
        self._runnable = runnable
        self._cores = cores or _own_cores()
        self._last = now()
        self._seconds = 0.0

    def seconds(self) -> float:
        """The weighted time; the load counts as it is now for all the time since the last call."""
        now = self._now()
        share = max(_share(self._runnable, self._cores), 1 / _SLOWEST)
        self._seconds += (now - self._last) * share
        self._last = now
        return self._seconds
