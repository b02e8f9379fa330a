"""The seal of a finished run: a hash of every raw file, kept in its status.

Raw evidence is never edited. A file that was changed after the end, lost or added makes the run
damaged: it is measured again, and no report counts its numbers. The status seals itself as well.
NCCL's logs are sealed by their size alone, since they may be long and are read by stretches.
"""

from __future__ import annotations

import hashlib
import json
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
    samples.GLOB,
    layout.FAILURE_GLOB,
    f"{layout.NCCL}/*",
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
        return []
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
    files = sorted({file for pattern in _RAW for file in path.glob(pattern) if file.is_file()})
    return {file.relative_to(path).as_posix(): _hash(file, path) for file in files}


def _hash(file: Path, path: Path) -> str:
    try:
        if file.parent != path:
            return f"{file.stat().st_size} bytes"
        return hashlib.sha256(file.read_bytes()).hexdigest()[:_HEX_DIGITS]
    except OSError as error:
        return f"unreadable: {error.strerror}"


def own_hash(status: dict[str, Any]) -> str:
    """The seal of a status: a hash of everything else in it."""
    text = json.dumps({k: v for k, v in status.items() if k != "seal"}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:_HEX_DIGITS]
