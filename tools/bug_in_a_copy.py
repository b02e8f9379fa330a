"""`python -m tools.bug_in_a_copy BUG FOLDER`: a copy of mfsdp_core with a bug in it.

BUG is a patch file, or its name in `tests/core/patches`, as R1. The first line of a patch says what
the bug does. FOLDER is made and gets the package `mfsdp_core`. As an arm of a sweep, written as in
`--arm base=checkout:FOLDER`, it shows what the bug does to losses, norms and times.

    historical/R1.patch   bugs that FSDP implementations had, by number
    unlisted/NAME.patch   bugs that somebody thought of to try the validator
    NAME.patch            bugs that `validate` cannot see from outside, but a test can
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import bench
from bench.errors import BenchError, UsageError

#: Of the checkout, also where tests run in a copy of their own.
_ROOT = Path(bench.__file__).parents[1]
CORE = _ROOT / "mfsdp_core"
PATCHES = _ROOT / "tests" / "core" / "patches"


#: Patches in the order of their numbers.
BUGS = tuple(PATCHES / "historical" / f"R{number}.patch" for number in range(1, 24))
UNLISTED = tuple(sorted(PATCHES.glob("unlisted/*.patch")))
#: Seen by tests alone.
OWN_BUGS = tuple(sorted(PATCHES.glob("*.patch")))
BUG_BY_ID = {patch.stem: patch for patch in (*BUGS, *UNLISTED, *OWN_BUGS)}


def copy_of_core(folder: Path, patch: Path | None = None) -> Path:
    """Copy mfsdp_core into `folder` (which exists or is made), apply `patch`, return the copy.

    Raises:
        UsageError: the patch does not fit, or changes nothing below mfsdp_core.
    """
    # With what Python has compiled of it: files keep their times, and the changed one does not.
    shutil.copytree(CORE, folder / CORE.name)
    if patch is not None:
        apply(folder, patch)
    return folder / CORE.name


def apply(folder: Path, patch: Path) -> None:
    """Apply `patch` to the copy of mfsdp_core in `folder`; lines may have moved.

    Raises:
        UsageError: as `copy_of_core`.
    """
    before = _sources(folder)
    # A repository around the folder would make git leave out what lies outside of it.
    environment = {**os.environ, "GIT_CEILING_DIRECTORIES": str(folder.resolve().parent)}
    command = ["git", "apply", "-C1", "--include=mfsdp_core/**", str(patch.resolve())]
    result = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    if _sources(folder) == before:
        raise UsageError(
            f"the patch {patch.name} does not fit mfsdp_core: expected a unified diff of "
            f"a/mfsdp_core/..., made from this version\n{result.stderr.strip()}"
        )


def _sources(folder: Path) -> dict[Path, bytes]:
    return {file: file.read_bytes() for file in (folder / CORE.name).rglob("*.py")}


def inject(name: str, folder: Path) -> Path:
    """Copy the core into the new folder `folder` with a bug in it; returns the copy.

    Raises:
        UsageError: an unknown bug, a patch that does not fit, or a folder that exists.
    """
    patch = BUG_BY_ID.get(name, Path(name))
    if not patch.is_file():
        raise UsageError(f"expected FILE.patch or its name in {PATCHES}, as R1; found {name}")
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        raise UsageError(f"cannot make the folder {folder}: {error.strerror}") from error
    return copy_of_core(folder, patch)


def main(arguments: list[str]) -> int:
    """The command."""
    if len(arguments) != 2:  # noqa: PLR2004 - BUG and FOLDER
        sys.stderr.write("usage: python -m tools.bug_in_a_copy BUG FOLDER\n")
        return 2
    try:
        copy = inject(arguments[0], Path(arguments[1]))
    except BenchError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    sys.stdout.write(f"{copy}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
