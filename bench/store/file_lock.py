"""A lock that the kernel frees when its owner dies, however it dies.

[Note: liveness by flock] A status file cannot say that its writer was killed by SIGKILL. The
owner of a run therefore holds an exclusive flock for as long as it lives; a reader that can take a
shared one knows that nobody owns the run any more. Readers only ever ask for the shared lock, so
they never disturb the owner nor each other. The descriptor is close-on-exec: ranks do not inherit
the lock.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from pathlib import Path

from bench.errors import UsageError
from bench.store.atomic import reporting_failed_writes

_NO_LOCKS = frozenset({errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS})


class FileLock:
    """An exclusive lock on `path`, held until `release` or the death of this process."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor: int | None = None

    def acquire(self, holder: str = "") -> bool:
        """Take the lock without waiting; False if somebody has it. `holder` is written into it.

        Raises:
            UsageError: the folder may not be written, or its file system has no locks.
            StoreFullError: no space for the lock file.
        """
        with reporting_failed_writes(self.path):
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(descriptor)
                return False
            except OSError as error:
                os.close(descriptor)
                if error.errno not in _NO_LOCKS:
                    raise
                raise UsageError(
                    f"cannot lock {self.path}: {error.strerror}; the file system of the results"
                    " folder must support locks (flock): use a local disk, or mount it with locking"
                ) from error
            try:
                os.ftruncate(descriptor, 0)
                os.write(descriptor, holder.encode())
            except OSError:
                os.close(descriptor)
                raise
        self._descriptor = descriptor
        return True

    def release(self) -> None:
        """Give the lock back; harmless when it is not held."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def is_locked(path: Path) -> bool:
    """True if a living process holds the exclusive lock on `path`; a missing file is free."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return False


def holder_of(path: Path) -> str:
    """What the owner wrote about itself, or an empty text."""
    with contextlib.suppress(OSError):
        return path.read_text(encoding="utf-8", errors="replace").strip()
    return ""
