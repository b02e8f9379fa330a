"""CPU time of this process by what its threads are for; Linux only.

On a CPU, autograd works in the thread that calls it; its own threads work for devices.
"""

from __future__ import annotations

import os
from pathlib import Path
from time import clock_gettime
from typing import Final

_TASKS: Final = "/proc/self/task"
_ROLES: Final = (("pt_autograd", "autograd"), ("gloo", "transport"), ("nccl", "transport"))
_PER_THREAD: Final = 0b110
"""Of a clock's number in Linux: the CPU time of one thread, as the scheduler counts it."""


class CpuMeter:
    """Reads the clocks of all threads: some microseconds each, and 0.1 ms where one is new."""

    def __init__(self) -> None:
        self._roles: dict[str, str] = {}
        self.read()  # so that the threads which are there now are new to no step

    def read(self) -> dict[str, float] | None:
        """Milliseconds since each thread began, by role; None where there is no such clock.

        Roles: main, autograd, transport (gloo, NCCL), other. A thread that has ended is gone.
        """
        try:
            threads = os.listdir(_TASKS)  # noqa: PTH208 - a tenth of the time of a path's iterdir
        except OSError:
            return None
        times: dict[str, float] = {}
        for thread in threads:
            try:
                seconds = clock_gettime((~int(thread) << 3) | _PER_THREAD)
                role = self._role(thread)
            except OSError:  # it has ended meanwhile
                continue
            times[role] = times.get(role, 0.0) + seconds * 1e3
        return times

    def _role(self, thread: str) -> str:
        if thread not in self._roles:
            name = (
                Path(_TASKS, thread, "comm")
                .read_text(encoding="utf-8", errors="replace")
                .strip()
                .lower()
            )
            role = next((role for part, role in _ROLES if part in name), "other")
            self._roles[thread] = "main" if int(thread) == os.getpid() else role
        return self._roles[thread]


def spent(
    before: dict[str, float] | None, after: dict[str, float] | None
) -> dict[str, float] | None:
    """What was spent between two readings, by role."""
    if before is None or after is None:
        return None
    return {role: round(max(0.0, now - before.get(role, 0.0)), 3) for role, now in after.items()}
