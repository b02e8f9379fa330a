"""A copy of mfsdp_core with a patch in it: how a bug is injected without a branch for it."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from bench.errors import UsageError
from bench.validate.bugs import PATCHES

CORE = Path(__file__).parents[2] / "mfsdp_core"
#: Lines of context on each side of a change that have to be as they were.
_CONTEXT_LINES = 1


class StalePatchError(UsageError):
    """A patch does not fit the source."""


def copy_of_core(folder: Path, patch: Path | None = None) -> Path:
    """Copy mfsdp_core into `folder` (which exists), apply `patch`, and return the copy.

    Raises:
        StalePatchError: the patch does not fit, or changes nothing below mfsdp_core.
    """
    target = folder / CORE.name
    # With what Python has compiled of them: files keep their times, and the changed one does not.
    shutil.copytree(CORE, target)
    if patch is not None:
        apply(folder, patch)
    return target


def apply(folder: Path, patch: Path) -> None:
    """Apply `patch` to the copy of mfsdp_core in `folder`; paths in it begin with mfsdp_core.

    Lines may have moved since the patch was made, and one line of context is enough.

    Raises:
        StalePatchError: as `copy_of_core`.
    """
    before = _sources(folder)
    said = ""
    # Patches of git name files a/mfsdp_core/..., others without the first part.
    for strip in ("-p1", "-p0"):
        said = said or _git_apply(folder, patch, strip)
        if _sources(folder) != before:
            return
    advice = (
        "write it anew against the source"
        if patch.is_relative_to(PATCHES)
        else "expected a unified diff whose paths begin with mfsdp_core, made from this version"
    )
    raise StalePatchError(f"the patch {patch.name} does not fit mfsdp_core: {advice}\n{said}")


def _git_apply(folder: Path, patch: Path, strip: str) -> str:
    """What git says against it; nothing is changed then."""
    # A repository around the folder would make git leave out what lies outside of it.
    alone = {**os.environ, "GIT_CEILING_DIRECTORIES": str(folder.resolve().parent)}
    command = ["git", "apply", strip, f"-C{_CONTEXT_LINES}", "--include=mfsdp_core/**"]
    result = subprocess.run(
        [*command, str(patch.resolve())],
        cwd=folder,
        env=alone,
        capture_output=True,
        text=True,
        check=False,
    )
    return result.stderr.strip()


def _sources(folder: Path) -> dict[str, bytes]:
    root = folder / CORE.name
    return {str(file.relative_to(root)): file.read_bytes() for file in sorted(root.rglob("*.py"))}
