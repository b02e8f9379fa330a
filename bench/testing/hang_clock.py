"""A clock for limits that stop a hang: what a busy machine makes processes wait does not count.

Time counts while all of them sleep, and as processor time of the busiest. Waiting for a processor
or for a disk is no hang. On a machine with nothing else to do that is the wall time.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import sub
from pathlib import Path

_BUSY_STATES = ("R", "D")
_LOOK_SECONDS = 0.2
#: Share of a processor that a process may use which only looks whether something has come.
_POLLING = 0.1
_TICK = 1.5 / os.sysconf("SC_CLK_TCK")
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
    cores = cores or len(os.sched_getaffinity(0))
    return seconds * min(_SLOWEST, max(1.0, runnable() / cores))


@dataclass(frozen=True)
class Activity:
    """Of a process: processor time so far in seconds, and whether all of its threads sleep."""

    processor_seconds: float
    asleep: bool


def activity(pid: int) -> Activity:
    """Asleep and without processor time once it has ended."""
    try:
        # After the name, which may hold blanks; user and system time come 12th and 13th.
        fields = _stat(Path(f"/proc/{pid}/stat"))
        states = [_stat(thread / "stat")[0] for thread in Path(f"/proc/{pid}/task").iterdir()]
    except OSError:
        return Activity(0.0, asleep=True)
    used = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return Activity(used, asleep=not any(state in _BUSY_STATES for state in states))


def _stat(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").rpartition(")")[2].split()


class HangClock:
    """Seconds since it was made in which the processes slept or computed; look every second."""

    def __init__(
        self,
        pids: Sequence[int],
        now: Callable[[], float] = time.monotonic,
        look: Callable[[int], Activity] = activity,
    ) -> None:
        self._pids = tuple(pids)
        self._now, self._look = now, look
        self._last = now()
        self._begun = self._before = self._used()
        self._asleep = self.processor_seconds = 0.0

    def seconds(self) -> float:
        """What is seen now holds for all the time since the last look."""
        passed = self._now() - self._last
        if passed >= _LOOK_SECONDS:
            used = self._used()
            most = max(map(sub, used, self._before))
            asleep = all(self._look(pid).asleep for pid in self._pids)
            if asleep and most <= _POLLING * passed + _TICK:
                self._asleep += passed
            self.processor_seconds = max(map(sub, used, self._begun))
            self._last, self._before = self._last + passed, used
        return self._asleep + self.processor_seconds

    def _used(self) -> list[float]:
        return [self._look(pid).processor_seconds for pid in self._pids]
