"""Bugs that can be injected into mfsdp_core, each a patch in the folder `patches`.

One source for all users: the regression tests of the core, which have to fail on a copy with the
bug, and `validate --inject`, whose checker has to notice it without knowing which bug is in.
`bench.validate.patched_core` makes the copy. The first line of a patch says what the bug does.

    patches/historical/R1.patch   bugs that FSDP implementations had; tests and documents use the
                                  same numbers
    patches/unlisted/NAME.patch   bugs that somebody thought of to try the validator
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from bench.errors import UsageError

PATCHES = Path(__file__).parent / "patches"


@dataclass(frozen=True)
class Bug:
    """One bug, and the patch that injects it."""

    id: str
    title: str
    patch: Path


def bug_of(patch: Path) -> Bug:
    """The bug in a patch file: its id is the file's name, its title the line before the diff.

    Raises:
        UsageError: a file that cannot be read.
    """
    try:
        lines = patch.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read the patch {patch}: {error}") from error
    first = lines[0].strip() if lines else ""
    untitled = not first or first.startswith(("diff ", "--- ", "From ", "Index: "))
    return Bug(patch.stem, patch.stem if untitled else first, patch)


def _number(bug: Bug) -> int:
    return int(bug.id.removeprefix("R"))


def _in(folder: str) -> list[Bug]:
    return [bug_of(patch) for patch in sorted((PATCHES / folder).glob("*.patch"))]


#: The historical bugs, in the order of their numbers.
BUGS: tuple[Bug, ...] = tuple(sorted(_in("historical"), key=_number))
BUG_BY_ID: dict[str, Bug] = {bug.id: bug for bug in BUGS}
UNLISTED: tuple[Bug, ...] = tuple(_in("unlisted"))
