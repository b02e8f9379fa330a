"""The folder that records go to: whether it can be written, has room and locks, and is shared."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from bench.doctor.finding import DoctorFinding
from bench.errors import BenchError
from bench.store.file_lock import FileLock, is_locked
from bench.store.file_system import FileSystem, file_system_of, nearest_folder

_ENOUGH_FREE_BYTES = 2**30


def results_findings(results: Path) -> list[DoctorFinding]:
    """About `results`, or about the folder that it would be made in."""
    folder = nearest_folder(results)
    system = file_system_of(folder)
    kind = system.kind or "a file system of unknown kind"
    where = f"{results.absolute()} on {kind}" + (
        f", mounted at {system.mount}" * bool(system.mount)
    )
    try:
        with tempfile.TemporaryDirectory(prefix=".doctor-", dir=folder) as scratch:
            locks = _locks(Path(scratch))
        free_bytes = shutil.disk_usage(folder).free
    except OSError as error:
        remedy = "choose a folder that you may write with --results, or free some space"
        found = f"{where}: cannot be written: {error.strerror}"
        return [DoctorFinding("problem", "results folder", found, "records", remedy)]
    return [_room(where, free_bytes), _sharing(system), locks]


def _room(where: str, free_bytes: int) -> DoctorFinding:
    found = f"{where}, {free_bytes / 2**30:.1f} GiB free"
    if free_bytes >= _ENOUGH_FREE_BYTES:
        return DoctorFinding("ok", "results folder", found)
    remedy = "free some space, or point --results at another disk"
    return DoctorFinding("note", "results folder", found, "room for the records of a sweep", remedy)


def _sharing(system: FileSystem) -> DoctorFinding:
    if system.is_shared:
        return DoctorFinding(
            "ok", "results of many nodes", f"{system.kind} is shared between machines"
        )
    return DoctorFinding(
        "note",
        "results of many nodes",
        "this file system is not known to be shared between machines",
        "runs on several nodes: each writes its samples into the results folder",
        "point --results at a folder that all nodes mount (NFS, Lustre, GPFS, ...)",
    )


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
