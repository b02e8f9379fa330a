"""Which code a run measures, as one hash: a finished cell counts only for the same code.

The hash covers the content of the files that run in a rank, committed or not, and the versions of
torch and Python. For `mfsdp` that is mfsdp_core too; for every engine, the modules of the other
engines are left out, so that a change of the core runs only the mfsdp cells again.
"""

from __future__ import annotations

import hashlib
import platform
from importlib import metadata
from pathlib import Path
from typing import get_args

from bench.launch.command import checkout_root
from bench.spec import EngineName, ResolvedRun

# What bench.worker loads and what shapes its numbers; store, launch and derive only keep them.
_RANK_CODE = (
    "bench/worker/**/*.py",
    "bench/loop.py",
    "bench/spec.py",
    "bench/models/**/*.py",
    "bench/data/**/*.py",
    "bench/engines/**/*.py",
    "bench/meters/**/*.py",
)
_CORE_CODE = ("mfsdp_core/**/*.py",)
_NOT_MEASURED = "mfsdp_core/testing/"
_HEX_DIGITS = 16


def code_identity(resolved: ResolvedRun, root: Path | None = None) -> str:
    """16 hex digits that change when the code measured by `resolved` changes.

    Args:
        resolved: decides which engine's code counts.
        root: checkout to look at; None is the one this process runs from.
    """
    base = root or checkout_root()
    digest = hashlib.sha256()
    for version in (f"torch {_version('torch')}", f"python {platform.python_version()}"):
        digest.update(version.encode() + b"\0")
    for file in measured_files(resolved.engine.name, base):
        content = hashlib.sha256((base / file).read_bytes()).hexdigest()
        digest.update(f"{file}\0{content}\0".encode())
    return digest.hexdigest()[:_HEX_DIGITS]


def measured_files(engine: EngineName, root: Path) -> list[str]:
    """Paths below `root`, with forward slashes and sorted, of the files that the hash covers."""
    patterns = _RANK_CODE + (_CORE_CODE if engine == "mfsdp" else ())
    others = {f"bench/engines/{name}.py" for name in get_args(EngineName) if name != engine}
    files = {
        path.relative_to(root).as_posix() for pattern in patterns for path in root.glob(pattern)
    }
    return sorted(
        file for file in files if file not in others and not file.startswith(_NOT_MEASURED)
    )


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "none"
