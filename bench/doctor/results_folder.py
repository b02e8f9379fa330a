"""The folder that records go to: whether it can be written, has room and locks, and is shared."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from bench.doctor.finding import DoctorFinding
from bench.errors import BenchError
from bench.store.file_lock import FileLock, is_locked

_ENOUGH_FREE_BYTES = 2**30


def results_findings(results: Path) -> list[DoctorFinding]:
    """About `results`, or about the folder that it would be made in."""
    folder = where = results.expanduser().absolute()
    while not folder.is_dir() and folder != folder.parent:
        folder = folder.parent
    try:
        with tempfile.TemporaryDirectory(prefix=".doctor-", dir=folder) as scratch:
            locks = _locks(Path(scratch))
        free_bytes = shutil.disk_usage(folder).free
    except OSError as error:
        remedy = "choose a folder that you may write with --results, or free some space"
        found = f"{where}: cannot be written: {error.strerror}"
        return [DoctorFinding("problem", "results folder", found, "records", remedy)]
    return [_room(where, free_bytes), locks]


def _room(where: Path, free_bytes: int) -> DoctorFinding:
    found = f"{where}, {free_bytes / 2**30:.1f} GiB free"
    if free_bytes >= _ENOUGH_FREE_BYTES:
        return DoctorFinding("ok", "results folder", found)
    remedy = "free some space, or point --results at another disk"
    return DoctorFinding("note", "results folder", found, "room for the records of a sweep", remedy)


def _locks(scratch: Path) -> DoctorFinding:
    lock = FileLock(scratch / "lock")
    try:
        held = lock.acquire("doctor") and is_locked(lock.path)
    except BenchError as error:
        held, found = False, str(error)
    else:
        found = "a lock that was taken does not show"
    finally:
        lock.release()
    if held:
        return DoctorFinding("ok", "file locks", "work")
    return DoctorFinding(
        "problem",
        "file locks",
        found,
        "one runner per folder, and runs that are known to live",
        "a local disk, or mount the file system with locks (Lustre: -o flock)",
    )
