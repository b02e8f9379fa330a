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
        stop: what is to stop; a `StopRequest` also gets the reason.
        announce: shows the hint, in a thread of its own: a display may hold a lock when a signal
            arrives. None writes to stderr.
        last_seconds: how long the block may still run after the second signal, to clean up.
    """
    first, second, over = Event(), Event(), Event()

    def on_signal(number: int, _frame: FrameType | None) -> None:
        if not stop.is_set():
            _request(stop, signal.Signals(number))
            first.set()
            return
        kill_descendants()
        if second.is_set() or last_seconds <= 0:
            _leave()
        second.set()

    def speak() -> None:
        first.wait()
        if not over.is_set():
            (announce or _say)(HINT)

    def limit_the_rest() -> None:
        second.wait()
        if not over.wait(last_seconds):
            _leave()

    speaker = threading.Thread(target=speak, daemon=True)
    speaker.start()
    threading.Thread(target=limit_the_rest, daemon=True).start()
    # A signal that is ignored (nohup, a background job) was meant to stay ignored.
    heeded = [number for number in _WHY if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, on_signal) for number in heeded}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        speaker.join(_SECONDS_TO_SPEAK if first.is_set() else 0)
        for event in (over, first, second):
            event.set()


def _request(stop: Event, number: signal.Signals) -> None:
    if isinstance(stop, StopRequest):
        job = os.environ.get("SLURM_JOB_ID")
        stop.why = _WHY[number] + (f", in job {job} of Slurm" if job else "")
    stop.set()


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
