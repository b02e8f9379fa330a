"""Files that are either the old version or the new one, never half of one.

A reader, a crash or a full disk between any two lines here leaves the old file in place: the new
content is written to another file, forced to disk, and renamed over it.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.errors import StoreFullError, StoreGoneError, UsageError

# EFBIG is a file size limit (ulimit -f): to the writer it is the same as a full disk.
_NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_NOT_ALLOWED = frozenset(
    {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENAMETOOLONG, errno.ENOENT, errno.ELOOP}
)


@contextlib.contextmanager
def reporting_failed_writes(path: Path) -> Iterator[None]:
    """Turn the OSError of a failed write to `path` into an error with a remedy.

    Raises:
        StoreFullError: no space is left.
        UsageError: the folder may not be written.
    """
    try:
        yield
    except OSError as error:
        if error.errno in _NO_SPACE:
            raise StoreFullError(
                f"cannot write {path}: {error.strerror}. Finished runs are complete on disk and"
                " were not touched; the run being written is kept as interrupted. Free some space"
                " (or point --results at another disk) and run again: only missing cells are run"
            ) from error
        if error.errno in _NOT_ALLOWED:
            raise UsageError(
                f"cannot write {path}: {error.strerror}; choose a results folder that you may"
                " write, or change its permissions"
            ) from error
        raise


def write_text_atomically(path: Path, text: str | bytes) -> None:
    """Replace `path` by `text` (UTF-8) as one step; the folder must exist.

    Raises:
        StoreFullError: no space; the previous version is still there.
        StoreGoneError: the folder does not exist any more.
    """
    if not path.parent.is_dir():
        raise StoreGoneError(
            f"cannot write {path}: its folder is gone; somebody removed or renamed it while it was"
            " in use, and what was in it cannot be kept. Other runs were not touched: run again,"
            " and only what is missing is run"
        )
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(2)}.tmp")
    with reporting_failed_writes(path):
        try:
            _write_and_sync(temporary, text if isinstance(text, bytes) else text.encode())
            temporary.replace(path)
            _sync_folder(path.parent)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise


def write_json_atomically(path: Path, document: Any) -> None:
    """`write_text_atomically` of readable JSON (two spaces, keys in the given order)."""
    write_text_atomically(path, json.dumps(document, indent=2, ensure_ascii=False) + "\n")


def _write_and_sync(path: Path, content: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    try:
        view = memoryview(content)
        while view:
            view = view[os.write(descriptor, view) :]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sync_folder(folder: Path) -> None:
    """Force the rename itself to disk; file systems that cannot sync a folder say EINVAL."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in {errno.EINVAL, errno.ENOTSUP}:
            raise
    finally:
        os.close(descriptor)
