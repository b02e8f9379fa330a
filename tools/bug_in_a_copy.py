"""`python -m tools.bug_in_a_copy BUG FOLDER`: a copy of mfsdp_core with a bug in it.

BUG is the number of a historical bug, as R1, or a patch file.

FOLDER is made and gets the package `mfsdp_core`. As an arm of a sweep, written as in
`--arm base=checkout:FOLDER`, it shows what the bug does to losses, norms and times.
"""

from __future__ import annotations

import sys
from pathlib import Path

from bench.errors import BenchError, UsageError
from bench.validate.injection import parse_bugs
from bench.validate.patched_core import copy_of_core


def inject(bug_id: str, folder: Path) -> Path:
    """Copy the core into the new folder `folder` with bug `bug_id` in it; returns the copy.

    Raises:
        UsageError: an unknown bug, a patch that does not fit the
            source, or a folder that exists.
    """
    (bug,) = parse_bugs(bug_id)
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        raise UsageError(f"cannot make the folder {folder}: {error.strerror}") from error
    return copy_of_core(folder, bug.patch)


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
