"""Runs the regression test of a historical bug on a copy of the core that has the bug.

The bugs are those of `bench.validate.bugs`, and those in `patches` beside this file: they change no
number, no memory and no wire of a training loop, so that `validate` cannot see them from outside.
`SEEN_BY_TESTS` names the tests that do. Prints the outcome per bug that has a regression test
and exits with 1 if one survives:

    python tests/core/mutants.py [R1 R8 ...]
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from bench.validate.bugs import BUGS, Bug, bug_of
from bench.validate.patched_core import copy_of_core

TESTS = Path(__file__).parent
_ROOT = TESTS.parents[1]
_TIMEOUT_SECONDS = 180
_TESTS_FAILED = 1
#: By the name of a patch: a file of tests, and what the names of those begin with that notice it.
SEEN_BY_TESTS = {
    "an-optimizer-steps-while-a-gather-ahead-reads-its-weights": (
        "test_stream_order.py",
        "has_no_race",
    ),
}
#: Bugs that `validate` does not see.
OWN_BUGS = tuple(bug_of(patch) for patch in sorted((TESTS / "patches").glob("*.patch")))


def regression_tests(bug: Bug) -> list[Path]:
    """The test files of the core that have a test of `bug`."""
    pattern = re.compile(rf"^def test_{bug.id.lower()}_", re.MULTILINE)
    return [file for file in sorted(TESTS.glob("test_*.py")) if pattern.search(file.read_text())]


def bugs_with_tests() -> list[Bug]:
    """The bugs that can be injected and have a regression test."""
    return [bug for bug in BUGS if regression_tests(bug)]


def is_noticed(bug: Bug, folder: Path) -> bool:
    """Whether the regression test of `bug` fails on a copy of the core with it, in `folder`."""
    return is_noticed_by(regression_tests(bug), f"test_{bug.id.lower()}_", bug, folder)


def is_noticed_by(tests: list[Path], keyword: str, bug: Bug, folder: Path) -> bool:
    """Whether the tests of some files, chosen by `keyword`, fail on a copy with the bug.

    Raises:
        RuntimeError: the copy could not be tested, which proves nothing.
    """
    copy_of_core(folder, bug.patch)
    shutil.copytree(TESTS, folder / "tests" / "core")
    shutil.copy(TESTS.parent / "conftest.py", folder / "tests")
    shutil.copy(_ROOT / "pyproject.toml", folder)
    files = [str(file.relative_to(_ROOT)) for file in tests]
    result = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"),
            *(*files, "-k", keyword),
        ],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_SECONDS,
        check=False,
    )
    if result.returncode not in (0, _TESTS_FAILED):
        raise RuntimeError(f"{bug.id}: {result.stdout}{result.stderr}")
    return result.returncode == _TESTS_FAILED


def main(wanted: list[str]) -> int:
    """Try the named bugs, or all."""
    survivors = 0
    for bug in bugs_with_tests():
        if wanted and bug.id not in wanted:
            continue
        with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
            noticed = is_noticed(bug, Path(folder))
        survivors += not noticed
        sys.stdout.write(f"{bug.id}: {'noticed' if noticed else 'SURVIVED'}\n")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
