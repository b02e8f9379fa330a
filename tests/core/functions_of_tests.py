"""A plugin of pytest that notes which functions of mfsdp_core each test executes, ranks included.

    FUNCTIONS_OF_TESTS=FILE python -m pytest -p functions_of_tests tests/core

adds a line of JSON to FILE per test that has passed; `bench.validate.test_trial` reads them. Calls
alone are traced, which costs little beside lines.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from bench.testing.call import Call
from bench.testing.workers import Workers

FILE = "FUNCTIONS_OF_TESTS"

_seen: set[tuple[str, str]] = set()
_passed: set[str] = set()
_started: dict[str, float] = {}


def _note(frame: Any, _event: str, _argument: object) -> None:
    _, found, file = frame.f_code.co_filename.partition("/mfsdp_core/")
    if found:
        _seen.add((file, frame.f_code.co_name))


def _trace(*, on: bool) -> None:
    threading.settrace(_note if on else None)  # type: ignore[arg-type]
    sys.settrace(_note if on else None)


def noted(call: Call, folder: str) -> Any:
    """On a rank: what `call` returns; its functions are written into `folder`, also if it fails."""
    _seen.clear()
    _trace(on=True)
    try:
        return call.run()
    finally:
        _trace(on=False)
        name = f"{os.getpid()}-{time.monotonic_ns()}"
        (Path(folder) / name).write_text(json.dumps(sorted(_seen)))


def pytest_configure() -> None:
    """Calls of ranks are noted from now on."""
    _folder.cleanup()
    Path(_folder.name).mkdir()
    plain: Any = Workers._run

    def run(workers: Workers, call: Call, ranks: int, seconds: float) -> list[Any]:
        wrapped = Call.of(noted, (call, _folder.name))
        found: list[Any] = plain(workers, wrapped, ranks, seconds)
        return found

    Workers._run = run  # type: ignore[method-assign]


_folder = tempfile.TemporaryDirectory(prefix="functions-")


def pytest_runtest_logstart(nodeid: str) -> None:
    """A test begins, its fixtures included."""
    _seen.clear()
    _started[nodeid] = time.monotonic()
    _trace(on=True)


def pytest_runtest_logreport(report: Any) -> None:
    """How it ended."""
    if report.when == "call" and report.passed:
        _passed.add(report.nodeid)


def pytest_runtest_logfinish(nodeid: str) -> None:
    """It is over: its line."""
    _trace(on=False)
    found = set(_seen)
    for file in Path(_folder.name).iterdir():
        found |= {tuple(one) for one in json.loads(file.read_text())}
        file.unlink()
    if nodeid not in _passed:
        return
    seconds = round(time.monotonic() - _started[nodeid], 2)
    line = {"test": nodeid, "seconds": seconds, "functions": sorted(found)}
    with Path(os.environ[FILE]).open("a") as out:
        out.write(json.dumps(line) + "\n")
