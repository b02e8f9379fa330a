"""Tests of the core meet mutants: those that execute the changed statement, up to one that fails.

Which do is noted once for a state of the core and of a test file. A test counts that fails twice
with the change and passes without it.
"""

from __future__ import annotations

import ast
import hashlib
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from bench.errors import BenchError
from bench.testing.workers import ForkServer, WorkersError
from bench.validate.patched_core import copy_of_core
from tools.mutation.line_coverage import Lines, noting_core, state_of_the_core
from tools.mutation.mutants import Mutant
from tools.mutation.pytest_run import ROOT, Ran, run_pytest

_TESTS = Path("tests/core")
#: What the processes that run pytest find loaded.
MODULES = ("pytest", "numpy")
#: Of one run of pytest, of one file of those whose lines are noted, with nothing else to do.
_RUN_SECONDS = 600.0
#: Of a run that notes lines.
_FILES_AT_ONCE = 12
#: Tests of a run on a mutant.
_AT_ONCE = 20
_NUMBERS = ("assert_close", "allclose", "equal", "is_close")


class TestTrials:
    """Mutants, one after another, each as a changed core that tests import.

    known: a file with the lines that every test executes; `trace` adds what is missing.
    """

    __test__ = False

    def __init__(self, fork_server: ForkServer, known: Path) -> None:
        self._fork_server = fork_server
        self._known = known
        self._passes: dict[str, bool] = {}
        self._left = {_version(file): file for file in _files()}
        self._tests: dict[str, Lines] = {}
        lines = known.read_text().splitlines() if known.exists() else ()
        for one in map(json.loads, lines):
            if self._left.pop(one["file"], None):
                for test, of_test in one["tests"].items():
                    self._tests[test] = {file: set(numbers) for file, numbers in of_test.items()}

    def trace(self, deadline: float) -> None:
        """Note the lines of tests whose files are not known yet, until `deadline`.

        Raises:
            BenchError: a run of tests ended as a whole.
        """
        with tempfile.TemporaryDirectory(prefix="core-") as name:
            noting_core(Path(name))
            left = [*self._left.values()]
            # Files of one run share their ranks, whose start takes longer than most files.
            for first in range(0, len(left), _FILES_AT_ONCE):
                if time.monotonic() < deadline:
                    files = left[first : first + _FILES_AT_ONCE]
                    ran = self._ran(Path(name), files, trace=True)
                    if ran.failed is not None and not ran.failed[0]:
                        raise BenchError(f"no lines of {' '.join(files)}: {ran.failed[1]}")
                    for file in files:
                        own = {
                            t: lines for t, lines in ran.lines.items() if t.startswith(f"{file}::")
                        }
                        self.keep(file, Ran(lines=own))

    def keep(self, file: str, ran: Ran) -> None:
        """Note the lines of the tests of `file`."""
        self._tests |= ran.lines
        lines = {
            test: {name: sorted(numbers) for name, numbers in of_test.items()}
            for test, of_test in ran.lines.items()
        }
        with self._known.open("a") as out:
            out.write(json.dumps({"file": _version(file), "tests": lines}) + "\n")
        sys.stderr.write(f"traced: {len(lines)} tests of {file}\n")

    def executing(self, mutant: Mutant) -> list[str]:
        """Tests that execute the changed statement, or lines of its file where an import does.

        Every file has its turn, and in it every function. First come those that compare numbers,
        then those of whose lines the largest share lies in the changed file.
        """
        shares = {}
        for test, lines in self._tests.items():
            own = len(lines.get(mutant.file, ()))
            if own and (mutant.is_on(lines) or not mutant.function):
                shares[test] = _compares(test), own / sum(map(len, lines.values()))
        turns: dict[str, tuple[int, int]] = {}
        of_function, functions = Counter[str](), Counter[str]()
        for test in sorted(shares, key=lambda one: shares[one], reverse=True):
            file, function = test.partition("::")[0], test.partition("[")[0]
            functions[file] += not of_function[function]
            of_function[function] += 1
            turns[test] = of_function[function], functions[file]
        return sorted(turns, key=lambda one: turns[one])

    def result(self, mutant: Mutant, tests: Sequence[str]) -> dict[str, Any]:
        """What came of it, as plain data."""
        start = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="core-") as name:
            mutant.write(copy_of_core(Path(name)))
            told = self._first_failure(Path(name), list(tests))
        seconds = round(time.monotonic() - start, 1)
        return {"outcome": "caught" if told else "survived", **told, "seconds": seconds}

    def _first_failure(self, core: Path, tests: list[str]) -> dict[str, str]:
        while tests:
            now = tests[:_AT_ONCE]
            failed = self._ran(core, now).failed
            if failed is None:
                tests = tests[_AT_ONCE:]
                continue
            test, found = failed
            # A file that cannot be imported fails as all of its tests; a death as the whole run.
            again = [test] if test else now
            if self._ran(core, again).failed is not None and self._pass_without(again):
                return {"case": test or now[0], "check": "test", "found": found}
            tests = tests[now.index(test) + 1 if test in now else _AT_ONCE :]
        return {}

    def _pass_without(self, tests: list[str]) -> bool:
        name = " ".join(tests)
        if name not in self._passes:
            self._passes[name] = self._ran(ROOT, tests).failed is None
        return self._passes[name]

    def _ran(self, core: Path, arguments: Sequence[str], *, trace: bool = False) -> Ran:
        try:
            with self._fork_server.workers(1, core) as workers:
                seconds = _RUN_SECONDS * (_FILES_AT_ONCE if trace else 1)
                (ran,) = workers.run(
                    run_pytest, str(core), tuple(arguments), trace, seconds=seconds
                )
        except WorkersError as error:
            return Ran(failed=("", str(error)[-160:]))
        found: Ran = ran
        return found


def _files() -> list[str]:
    return [str(file.relative_to(ROOT)) for file in sorted((ROOT / _TESTS).rglob("test_*.py"))]


def _version(file: str) -> str:
    """A test file, with a name of what it and all files of the core hold."""
    content = state_of_the_core() + (ROOT / file).read_text()
    return f"{file} {hashlib.sha256(content.encode()).hexdigest()[:12]}"


def _compares(test: str) -> bool:
    """Whether the function of a test says which values are right."""
    file, _, function = test.partition("::")
    return function.partition("[")[0] in _comparing(file)


@cache
def _comparing(file: str) -> set[str]:
    tree = ast.parse((ROOT / file).read_bytes())
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            for inside in ast.walk(node):
                is_equal = isinstance(inside, ast.Compare) and isinstance(inside.ops[0], ast.Eq)
                name = getattr(inside, "attr", getattr(inside, "id", ""))
                if is_equal or name in _NUMBERS:
                    found.add(node.name)
    return found
