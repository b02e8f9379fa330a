"""Which lines of mfsdp_core a call on ranks executes, or a test of the core: by coverage.py.

    pytest -p tools.executed_lines --executed-lines FILE tests/core

is the plug-in: a line of JSON in FILE for every test, with the lines of its ranks.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.testing.call import FunctionCall
from bench.testing.workers import Workers
from tools.bug_in_a_copy import CORE

#: Line numbers by file below mfsdp_core.
Lines = dict[str, list[int]]


class Trace:
    """Lines that this process executes, and those of ranks that are added."""

    def __init__(self) -> None:
        import coverage  # of developers alone: environments of other torches lack it

        options: dict[str, Any] = {"data_file": None, "config_file": False}
        self._coverage = coverage.Coverage(include=[f"{CORE}/*"], messages=False, **options)
        self._coverage.set_option("run:disable_warnings", ["no-data-collected"])
        self._lines: dict[str, set[int]] = {}

    def __enter__(self) -> Trace:
        self._coverage.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._coverage.stop()
        data = self._coverage.get_data()
        for file in data.measured_files():
            self.add({str(Path(file).relative_to(CORE)): data.lines(file) or []})

    def add(self, lines: Lines) -> None:
        """Lines of a rank."""
        for file, numbers in lines.items():
            self._lines.setdefault(file, set()).update(numbers)

    @property
    def lines(self) -> Lines:
        """All of them, in order."""
        return {file: sorted(numbers) for file, numbers in self._lines.items()}


def executed(call: FunctionCall) -> tuple[Any, Lines]:
    """On a rank: what `call` returns, and the lines that it executes."""
    with Trace() as trace:
        value = call.run()
    return value, trace.lines


def pytest_addoption(parser: pytest.Parser) -> None:
    """The option of the plug-in."""
    parser.addoption("--executed-lines", type=Path, required=True, metavar="FILE")


class _Tracing:
    """Traces tests, and what ranks do for them."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._trace = Trace()
        workers: Any = Workers
        plain = workers._run

        def run(own: Any, call: FunctionCall, *limits: Any) -> list[Any]:
            answers = plain(own, FunctionCall.of(executed, (call,)), *limits)
            for _, lines in answers:
                self._trace.add(lines)
            return [value for value, _ in answers]

        workers._run = run

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """A test, its fixtures included."""
        self._trace = Trace()
        with self._trace:
            yield
        line = json.dumps({"id": item.nodeid, "lines": self._trace.lines}) + "\n"
        with self._file.open("ab", buffering=0) as out:  # in one piece, next to other processes
            out.write(line.encode())


def pytest_configure(config: pytest.Config) -> None:
    """Begin."""
    config.pluginmanager.register(_Tracing(config.getoption("--executed-lines")))
