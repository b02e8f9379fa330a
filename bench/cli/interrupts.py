"""Ctrl-C while runs are measured: once ends the current run, twice ends everything at once.

The first signal sets an event: `bench.launch` ends the ranks and writes the record. The second
kills every process below this one and leaves; the run that was going on has no final status then
and reads back as interrupted. Finished records are complete on disk in both cases.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from threading import Event
from types import FrameType
from typing import Any

from bench.cli.exit_codes import INTERRUPTED

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_KILL_ROUNDS = 20


@contextlib.contextmanager
def stop_on_signals(stop: Event) -> Iterator[None]:
    """Set `stop` on the first SIGINT, SIGTERM or SIGHUP; on the second, kill and leave."""

    def on_signal(_number: int, _frame: FrameType | None) -> None:
        if stop.is_set():
            kill_descendants()
            os._exit(INTERRUPTED)
        stop.set()
        _say("\nending the current run; once more to end at once\n")

    # A signal that is ignored (nohup, a background job) was meant to stay ignored.
    heeded = [number for number in _SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, on_signal) for number in heeded}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def kill_descendants() -> None:
    """SIGKILL every process below this one, those in sessions of their own included.

    Repeated until none is left: a process may start another one between the look and the kill.
    """
    import psutil

    own = psutil.Process()
    for _ in range(_KILL_ROUNDS):
        alive: list[Any] = [
            child
            for child in own.children(recursive=True)
            if child.status() != psutil.STATUS_ZOMBIE
        ]
        if not alive:
            return
        for child in alive:
            with contextlib.suppress(psutil.Error):
                child.kill()
        psutil.wait_procs(alive, timeout=0.5)


def _say(text: str) -> None:
    """Write without buffers or locks: a signal may arrive in the middle of a print."""
    with contextlib.suppress(OSError):
        os.write(2, text.encode())
