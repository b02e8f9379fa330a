"""The seal of a finished run: a hash of every raw file, kept in its status.

Raw evidence is never edited. A file that was changed after the end, lost or added makes the run
damaged: it is measured again, and no report counts its numbers. The status seals itself as well.
NCCL's logs are sealed by their size alone, since they may be long and are read by stretches.
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
_RAW = (
    layout.SPEC,
    layout.ENVIRONMENT,
    layout.RUNTIME,
    layout.MEMORY,
    layout.CHECKPOINTS,
    layout.COUNTS,
    samples.GLOB,
    layout.FAILURE_GLOB,
)


def sealed(path: Path, status: RunStatus) -> RunStatus:
    """`status` with the seal of the run folder `path`, whose files are all written."""
    status = status.model_copy(update={"files": _hashes(path), "seal": None})
    return status.model_copy(update={"seal": own_hash(status.model_dump(mode="json"))})


def broken_seals(path: Path, status: dict[str, Any]) -> list[str]:
    """What was changed since the end of the run, in words; nothing where it was never sealed.

    Args:
        path: folder of the run.
        status: its status as it lies on disk, so that no default of this version is taken for it.
    """
    if status.get("seal") is None:
        lost = status.get("files") is not None
        return [f"{layout.STATUS} has lost its seal after the run had ended"] if lost else []
    problems = []
    if status["seal"] != own_hash(status):
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
    """The seal of a status: a hash of everything else in it."""
    text = json.dumps({k: v for k, v in status.items() if k != "seal"}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:_HEX_DIGITS]
