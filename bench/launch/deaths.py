"""When each child of this process died, as the kernel reports it.

torchrun looks at its ranks a few times per second and ends the rest as soon as one has failed:
afterwards several ranks have a signal for an exit code, in no order. A process descriptor becomes
readable at the moment of death, so one sleeping thread notes the order.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time
from pathlib import Path

import psutil

_LOOK_SECONDS = 0.05
_CATCH_UP_SECONDS = 5.0


class Deaths:
    """Watches the children of this process from a thread of its own, until `expected` were seen.

    On a kernel without process descriptors it stays empty.
    """

    def __init__(self, expected: int) -> None:
        self._expected = expected
        self._seconds: dict[int, float] = {}
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def of_all(self) -> dict[int, float]:
        """Process id -> Unix time of its end, once all children have ended; {} if none is known.

        Waits for the thread: on a busy machine the children may be reaped before it has run.
        """
        self._thread.join(_CATCH_UP_SECONDS)
        return dict(self._seconds)

    def _watch(self) -> None:
        poll = select.poll()
        pid_of: dict[int, int] = {}  # descriptor -> process id
        known: set[int] = set()
        # Any OSError: no descriptors on this kernel, or none left.
        with contextlib.suppress(OSError, psutil.Error, AttributeError):
            while len(known) < self._expected or pid_of:
                if len(known) < self._expected:
                    for pid in _children() - known:
                        known.add(pid)
                        descriptor = os.pidfd_open(pid)
                        pid_of[descriptor] = pid
                        poll.register(descriptor, select.POLLIN)
                wait = _LOOK_SECONDS * 1000 if len(known) < self._expected else None
                ended = poll.poll(wait)
                now = time.time()
                for descriptor, _ in ended:
                    poll.unregister(descriptor)
                    self._seconds[pid_of.pop(descriptor)] = now
                    os.close(descriptor)


def _children() -> set[int]:
    """By the kernel's own list: psutil reads about every process of the machine."""
    lists = list(Path("/proc/self/task").glob("*/children"))
    if not lists:  # a kernel without such lists
        return {child.pid for child in psutil.Process().children()}
    found: set[int] = set()
    for file in lists:
        with contextlib.suppress(OSError):  # of a thread that has just ended
            found.update(map(int, file.read_text(encoding="utf-8").split()))
    return found
