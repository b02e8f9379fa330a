"""Tests of the core meet mutants: those that execute the changed function, up to one that fails.

Which do is noted once for a state of the core, by a plugin of pytest beside the tests. A test that
fails with the change counts if it passes without it.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.validate.mutants import Mutant, write
from bench.validate.mutation import CORE, copy_of_core

_ROOT = CORE.parent
_TESTS = Path("tests/core")
_PLUGIN = "functions_of_tests"
_FAILED = 1
#: Files that are traced by one process, which takes some seconds to start.
_FILES_AT_ONCE = 12
#: Of one run of pytest on a mutant; one that waits for ever is ended by the limit of a test.
_TEST_SECONDS = 100
_RUN_SECONDS = 900.0


def state_of_the_core() -> str:
    """A name of what all its files hold."""
    sources = b"".join(path.read_bytes() for path in sorted(CORE.rglob("*.py")))
    return hashlib.sha256(sources).hexdigest()[:12]


class TestTrials:
    """Mutants, one after another, each in a folder with a changed core and the tests.

    known: a file with the functions that every test executes; `trace` adds what lacks.
    """

    __test__ = False

    def __init__(self, known: Path) -> None:
        self._known = known.with_suffix(f".{state_of_the_core()}.jsonl")
        self._passes: dict[str, bool] = {}

    def trace(self, deadline: float) -> None:
        """Note the functions of tests whose files are not known yet, until `deadline`."""
        done = {test.partition("::")[0] for test in self._tests()}
        files = [str(_TESTS / file.name) for file in sorted((_ROOT / _TESTS).glob("test_*.py"))]
        left = [file for file in files if file not in done]
        while left and time.monotonic() < deadline:
            now, left = left[:_FILES_AT_ONCE], left[_FILES_AT_ONCE:]
            with tempfile.TemporaryDirectory() as folder:
                found = Path(folder) / "functions"
                found.touch()
                told = _pytest(_ROOT, [*now, "-p", _PLUGIN], {"FUNCTIONS_OF_TESTS": str(found)})
                lines = found.read_text()
            # Files without a test that can run here are known as well.
            known = [json.dumps({"test": f"{file}::", "functions": []}) + "\n" for file in now]
            with self._known.open("a") as out:
                out.write(lines + "".join(known))
            sys.stderr.write(f"traced: {', '.join(now)} {told.stdout.strip().splitlines()[-1:]}\n")

    def executing(self, mutant: Mutant) -> list[str]:
        """Tests that execute the changed function, or its file where it is in none.

        Those come first of whose functions the largest share lies in the changed file.
        """
        shares = {}
        for test, functions in self._tests().items():
            own = [name for file, name in functions if file == mutant.file]
            if mutant.function in own or (own and not mutant.function):
                shares[test] = len(own) / len(functions)
        return sorted(shares, key=lambda test: shares[test], reverse=True)

    def result(self, mutant: Mutant, tests: Sequence[str]) -> dict[str, Any]:
        """What came of it, as plain data."""
        start = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="core-") as name:
            folder = Path(name)
            write(mutant, copy_of_core(folder))
            shutil.copytree(_ROOT / _TESTS, folder / _TESTS)
            for beside in ("tests/conftest.py", "pyproject.toml"):
                shutil.copy(_ROOT / beside, folder / beside)
            told = self._first_failure(folder, list(tests)) if tests else {}
        seconds = round(time.monotonic() - start, 1)
        return {"outcome": "caught" if told else "survived", **told, "seconds": seconds}

    def _first_failure(self, folder: Path, tests: list[str]) -> dict[str, str]:
        while tests:
            run = _pytest(folder, ["-x", f"--timeout={_TEST_SECONDS}", *tests])
            if run.returncode == 0:
                return {}
            said = [line for line in run.stdout.splitlines() if line.startswith(("FAILED", "ERR"))]
            if run.returncode != _FAILED or not said:
                # Not even collected, or ended from outside.
                return {"case": tests[0], "check": "pytest", "found": run.stdout[-160:]}
            test, _, found = said[0].partition(" ")[2].partition(" - ")
            if self._passes_without(test):
                return {"case": test, "check": "test", "found": found[:160]}
            tests = tests[tests.index(test) + 1 :] if test in tests else []
        return {}

    def _passes_without(self, test: str) -> bool:
        if test not in self._passes:
            self._passes[test] = _pytest(_ROOT, [test]).returncode == 0
        return self._passes[test]

    def _tests(self) -> dict[str, list[list[str]]]:
        if not self._known.exists():
            return {}
        lines = map(json.loads, self._known.read_text().splitlines())
        return {one["test"]: one["functions"] for one in lines}


def _pytest(
    folder: Path, arguments: Sequence[str], beside: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run it on the core of `folder`, with the rest of this checkout."""
    path = os.pathsep.join((str(folder), str(folder / _TESTS), str(_ROOT)))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    try:
        return subprocess.run(
            [*command, *arguments],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": path, **(beside or {})},
            capture_output=True,
            text=True,
            timeout=_RUN_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        said = f"no end after {error.timeout:.0f} s"
        return subprocess.CompletedProcess(error.cmd, -1, said, "")
