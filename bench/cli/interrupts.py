"""Ctrl-C while runs are measured: once ends the current run, twice ends everything at once.

The first signal sets the stop request: `bench.launch` ends the ranks and writes the record. The
second kills every process below this one; what is left to do then (the record, the cursor of the
terminal) gets a few seconds, and this process leaves. Finished records are complete on disk in both
cases, and the record of the run that was going on says who ended it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from threading import Event
from types import FrameType
from typing import Any

from bench.cli.exit_codes import INTERRUPTED
from bench.launch.watch import StopRequest

HINT = "ending the current run; once more to end at once"

_WHY = {
    signal.SIGINT: "interrupted by the user (Ctrl-C)",
    signal.SIGTERM: "interrupted by SIGTERM",
    signal.SIGHUP: "interrupted by SIGHUP (the terminal was closed)",
}
_KILL_ROUNDS = 200
_SECONDS_TO_DIE = 0.02
_SECONDS_TO_SPEAK = 1.0
_SHOW_CURSOR = "\x1b[?25h"


@contextlib.contextmanager
def stop_on_signals(
    stop: Event, announce: Callable[[str], None] | None = None, *, last_seconds: float = 0.0
) -> Iterator[None]:
    """Set `stop` on the first SIGINT, SIGTERM or SIGHUP; on the second, kill and leave.

    Args:
        stop: what is asked to stop; a `StopRequest` is told why.
        announce: shows the hint, in a thread of its own: a display may hold a lock when a signal
            arrives. None writes to stderr.
        last_seconds: how long the block may still run after the second signal, to clean up.
    """
    signals = _Signals(stop, announce or _say, last_seconds)
    # A signal that is ignored (nohup, a background job) was meant to stay ignored.
    heeded = [number for number in _WHY if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, signals.on_signal) for number in heeded}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        signals.finish()


class _Signals:
    """What arrives while a block runs; one thread shows the hint, one watches the last seconds."""

    def __init__(self, stop: Event, announce: Callable[[str], None], last_seconds: float) -> None:
        self._stop = stop
        self._announce = announce
        self._last_seconds = last_seconds
        self._first, self._second, self._over = Event(), Event(), Event()
        self._speaker = threading.Thread(target=self._speak, daemon=True)
        self._speaker.start()
        threading.Thread(target=self._limit_the_rest, daemon=True).start()

    def on_signal(self, number: int, _frame: FrameType | None) -> None:
        if not self._stop.is_set():
            if isinstance(self._stop, StopRequest):
                self._stop.why = _WHY[signal.Signals(number)]
                if job := os.environ.get("SLURM_JOB_ID"):
                    self._stop.why += f", in job {job} of Slurm"
            self._stop.set()
            self._first.set()
            return
        kill_descendants()
        if self._second.is_set() or self._last_seconds <= 0:
            _leave()
        self._second.set()

    def finish(self) -> None:
        if self._first.is_set():
            self._speaker.join(_SECONDS_TO_SPEAK)
        self._over.set()
        self._first.set()
        self._second.set()

    def _speak(self) -> None:
        self._first.wait()
        if not self._over.is_set():
            self._announce(HINT)

    def _limit_the_rest(self) -> None:
        self._second.wait()
        if not self._over.wait(self._last_seconds):
            _leave()


def kill_descendants() -> None:
    """SIGKILL every process below this one, those in sessions of their own included.

    Repeated until none is left: a process may start another one between the look and the kill. The
    exit codes are left to those who wait for them: taken here, a killed agent would read as one
    that ended well.
    """
    import psutil

    own = psutil.Process()
    for _ in range(_KILL_ROUNDS):
        alive: list[Any] = []
        for child in own.children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if child.status() != psutil.STATUS_ZOMBIE:
                    alive.append(child)
        if not alive:
            return
        for child in alive:
            with contextlib.suppress(psutil.Error):
                child.kill()
        time.sleep(_SECONDS_TO_DIE)


def _leave() -> None:
    """End this process now. A live display has hidden the cursor, and nobody else will show it."""
    with contextlib.suppress(OSError):
        if os.isatty(2):
            os.write(2, f"{_SHOW_CURSOR}\n".encode())
    os._exit(INTERRUPTED)


def _say(text: str) -> None:
    """Write without buffers or locks: a signal may arrive in the middle of a print."""
    with contextlib.suppress(OSError):
        os.write(2, f"\n{text}\n".encode())
