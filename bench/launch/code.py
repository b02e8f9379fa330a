"""Which code a run measures, as one hash: a finished cell counts only for the same code.

The hash covers the content of the files that run in a rank, committed or not, and the versions of
torch and Python. For `mfsdp` that is mfsdp_core too; for every engine, the modules of the other
engines are left out, so that a change of the core runs only the mfsdp cells again. An arm's hash
also covers the packages that were installed, or checked out, for it.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

from bench.launch.named_code import named_files
from bench.launch.rank_code import RankCode, own_code
from bench.spec import ResolvedRun

_HEX_DIGITS = 16


def code_identity(
    resolved: ResolvedRun, root: Path | None = None, *, code: RankCode | None = None
) -> str:
    """16 hex digits that change when the code measured by `resolved` changes.

    Args:
        resolved: decides which engine's code counts.
        root: checkout to look at; None is the one this process runs from.
        code: an arm's code, instead of `root`.
    """
    code = code or (own_code() if root is None else RankCode(root, sys.executable))
    digest = hashlib.sha256()
    torch, python = code.versions()
    for version in (f"torch {torch}", f"python {python}"):
        digest.update(version.encode() + b"\0")
    for file, content in sorted(code.file_hashes(resolved.engine.name).items()):
        digest.update(f"{file}\0{content}\0".encode())
    for file, content in sorted(named_files(resolved).items()):
        digest.update(f"named {file}\0{content}\0".encode())
    for line in _added(code, resolved.engine.name):
        digest.update(line.encode() + b"\0")
    return digest.hexdigest()[:_HEX_DIGITS]


def measured_files(engine: str, root: Path) -> list[str]:
    """Paths below `root`, with forward slashes and sorted, of the files that the hash covers."""
    return sorted(RankCode(root, sys.executable).file_hashes(engine))


def _added(code: RankCode, engine: str) -> list[str]:
    """What an arm has beside a checkout; no path: the same code hashes the same anywhere."""
    pinned = code.pinned
    if pinned is None or not (pinned.packages or pinned.distributions):
        return []
    return [
        f"torch engine {pinned.torch_engines.get(engine)}",
        json.dumps({name: found["sha256"] for name, found in sorted(pinned.packages.items())}),
        json.dumps({name: item["version"] for name, item in sorted(pinned.distributions.items())}),
    ]
