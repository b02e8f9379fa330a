"""Commit and uncommitted changes of the checkout a run was started from."""

from __future__ import annotations

import hashlib
import subprocess
from pathlib import Path
from typing import Any

_TIMEOUT_SECONDS = 20.0
_HEX_DIGITS = 16

_NO_CODE = tuple(
    f":(exclude)*.{ending}"
    for ending in ("yaml", "yml", "md", "txt", "log", "csv", "html", "json", "pyc")
)


def git_state(root: Path) -> dict[str, Any]:
    """`commit`, `dirty` and `dirty_hash` of the repository at `root`; None where git cannot say.

    dirty_hash covers the difference to the commit and the names and contents of untracked files
    that git does not ignore; None for a clean tree. Untracked files that are no code, as a sweep
    file or a log that lies beside it, or what Python has compiled, change nothing.
    """
    commit = _git(root, "rev-parse", "HEAD")
    if commit is None:
        return {"commit": None, "dirty": None, "dirty_hash": None}
    changes = _git(root, "diff", "HEAD", "--binary") or b""
    untracked = _git(root, "ls-files", "--others", "--exclude-standard", "-z", "--", ".", *_NO_CODE)
    untracked = untracked or b""
    dirty = bool(changes or untracked)
    return {
        "commit": commit.decode().strip(),
        "dirty": dirty,
        "dirty_hash": _hash(root, changes, untracked) if dirty else None,
    }


def _hash(root: Path, changes: bytes, untracked: bytes) -> str:
    digest = hashlib.sha256(changes)
    for name in sorted(filter(None, untracked.split(b"\0"))):
        digest.update(b"\0" + name + b"\0")
        path = root / name.decode(errors="surrogateescape")
        try:
            digest.update(path.read_bytes())
        except OSError:
            digest.update(b"unreadable")
    return digest.hexdigest()[:_HEX_DIGITS]


def _git(root: Path, *arguments: str) -> bytes | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *arguments],
            capture_output=True,
            timeout=_TIMEOUT_SECONDS,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout
