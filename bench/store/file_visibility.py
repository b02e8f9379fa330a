"""What other machines wrote to a shared file system, and is not seen here yet.

[Note: late files] A client of NFS or Lustre caches listings and attributes, up to a minute. A file
that was closed elsewhere may be missing here, or be its older version, and a file that is replaced
may go stale under an open descriptor. So an absence is believed only after that minute, and only
on file systems that other machines write to: on a local one nothing is late, and nobody waits.
"""

from __future__ import annotations

import errno
import functools
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

from bench.store.file_system import file_system_of

LATE_SECONDS = 60.0

_STALE_TRIES = 5
_STALE_SECONDS = 0.05
_LOOK_SECONDS = 0.25


@functools.lru_cache(maxsize=64)
def is_shared(folder: Path) -> bool:
    """Whether other machines write to the file system of `folder`."""
    return file_system_of(folder).is_shared


def read_bytes(file: Path) -> bytes:
    """Content of `file`; opened again where it was replaced on another machine while it was read.

    Raises:
        OSError: it cannot be read.
    """
    for left in reversed(range(_STALE_TRIES)):
        try:
            return file.read_bytes()
        except OSError as error:
            if error.errno != errno.ESTALE or not left:
                raise
        time.sleep(_STALE_SECONDS)
    raise AssertionError("unreachable")


def wait_until(seen: Callable[[], bool], folder: Path, seconds: float = LATE_SECONDS) -> bool:
    """Whether `seen` becomes true; waits for it, up to `seconds`, only on a shared file system."""
    deadline = time.monotonic() + (seconds if is_shared(folder) else 0.0)
    while not seen():
        if time.monotonic() >= deadline:
            return False
        time.sleep(_LOOK_SECONDS)
    return True


def late_seconds(folder: Path, written_utc: str | None) -> float:
    """For how long files written until `written_utc` may still be missing from `folder`."""
    if written_utc is None or not is_shared(folder):
        return 0.0
    try:
        age = (datetime.now(UTC) - datetime.fromisoformat(written_utc)).total_seconds()
    except (ValueError, TypeError):
        return 0.0
    return min(max(LATE_SECONDS - age, 0.0), LATE_SECONDS)
