"""The checksums of a finished run: of every raw file and of its status, which keeps them.

Raw evidence is never edited. A file that was changed after the end, lost or added makes the run
damaged: it is measured again, and no report counts its numbers. Of NCCL's logs the size alone is
kept, since they may be long and are read by stretches.
"""

from __future__ import annotations

import fnmatch
import hashlib
import json
import os
from pathlib import Path
from typing import Any

from bench.record import RunStatus
from bench.store import layout, samples

_HEX_DIGITS = 32
#: What a status has had since a version after the one that first kept checksums.
_LATER = frozenset({"job", "packed"})
_RAW = (
    layout.SPEC,
    layout.ENVIRONMENT,
    layout.RUNTIME,
    layout.MEMORY,
    layout.CHECKPOINTS,
    layout.COUNTS,
    layout.HOST,
    samples.GLOB,
    layout.FAILURE_GLOB,
)


def with_checksums(path: Path, status: RunStatus) -> RunStatus:
    """`status` with the checksums of the run folder `path`, whose files are all written."""
    status = status.model_copy(update={"files": _hashes(path), "checksum": None})
    return status.model_copy(update={"checksum": own_hash(status.model_dump(mode="json"))})


def broken_checksums(path: Path, status: dict[str, Any]) -> list[str]:
    """What was changed since the end of the run, in words; nothing where none were kept.

    Args:
        path: folder of the run.
        status: as it lies on disk (upgraded), so that no default of this version is taken for it.
    """
    if status.get("checksum") is None:
        # A run that goes on has none yet.
        gone = "checksum" not in status or status.get("ended_utc") is not None
        removed = gone and not _LATER.isdisjoint(status)
        lost = status.get("files") is not None or removed
        return [f"{layout.STATUS} has lost its checksum after the run had ended"] if lost else []
    problems = []
    if status["checksum"] != own_hash(status):
        problems.append(f"{layout.STATUS} was changed after the run had ended")
    listed = status.get("files")
    kept, found = listed if isinstance(listed, dict) else {}, _hashes(path)
    for name in sorted({*kept, *found}):
        if name not in found:
            problems.append(f"{name} is missing; the run had left one")
        elif name not in kept:
            problems.append(f"{name} was added after the run had ended")
        elif kept[name] != found[name]:
            problems.append(f"{name} was changed after the run had ended")
    return problems


def _hashes(path: Path) -> dict[str, str]:
    """By name; a look at each folder, since many runs are read at a time."""
    own = {
        name: _hash(path / name)
        for name in _files(path)
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in _RAW)
    }
    logs = {
        f"{layout.NCCL}/{name}": f"{(path / layout.NCCL / name).stat().st_size} bytes"
        for name in _files(path / layout.NCCL)
    }
    return own | logs


def _files(folder: Path) -> list[str]:
    try:
        with os.scandir(folder) as entries:
            return sorted(entry.name for entry in entries if entry.is_file())
    except OSError:
        return []


def _hash(file: Path) -> str:
    try:
        with file.open("rb", buffering=0) as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()[:_HEX_DIGITS]
    except OSError as error:
        return f"unreadable: {error.strerror}"


def own_hash(status: dict[str, Any]) -> str:
    """The checksum of a status or of an import: a hash of everything else in it."""
    text = json.dumps({k: v for k, v in status.items() if k != "checksum"}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:_HEX_DIGITS]
