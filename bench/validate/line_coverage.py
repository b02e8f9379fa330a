"""Which lines of mfsdp_core a call on a rank executes."""

from __future__ import annotations

import hashlib
import json
import sys
import threading
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

from bench.testing.call import Call
from bench.validate.mutation import CORE

#: Line numbers by file below mfsdp_core.
Lines = dict[str, set[int]]


@cache
def state_of_the_core() -> str:
    """A name of what all its files hold."""
    sources = b"".join(path.read_bytes() for path in sorted(CORE.rglob("*.py")))
    return hashlib.sha256(sources).hexdigest()


class LineTracer:
    """Notes lines of mfsdp_core that this process executes, in all threads of Python."""

    def __init__(self) -> None:
        self.lines: Lines = {}

    def start(self) -> None:
        """Lines count from now on, and none so far."""
        self.lines = {}
        threading.settrace(self._enter)
        sys.settrace(self._enter)

    def stop(self) -> None:
        """No further line counts."""
        sys.settrace(None)
        threading.settrace(None)

    def _enter(self, frame: FrameType, _event: str, _argument: object) -> Any:
        _, found, file = frame.f_code.co_filename.partition("/mfsdp_core/")
        if not found:
            return None
        lines = self.lines.setdefault(file, set())
        lines.add(frame.f_lineno)

        def step(frame: FrameType, event: str, _argument: object) -> Any:
            if event == "line":
                lines.add(frame.f_lineno)
            return step

        return step


def traced(call: Call) -> Lines:
    """On a rank: the lines of mfsdp_core that `call` executes."""
    tracer = LineTracer()
    tracer.start()
    try:
        call.run()
    finally:
        tracer.stop()
    return tracer.lines


def joined(of_ranks: list[Lines]) -> Lines:
    """Lines that any rank executed."""
    found: Lines = {}
    for lines in of_ranks:
        for file, numbers in lines.items():
            found.setdefault(file, set()).update(numbers)
    return found


class CoverageFile:
    """Lines that each case executes, kept in a file of JSON lines: a run adds what lacks.

    A line counts for one state of the core and one content of the case.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._core = state_of_the_core()
        self._known: dict[str, tuple[float, Lines]] = {}
        if file.exists():
            for text in file.read_text().splitlines():
                one = json.loads(text)
                lines = {name: set(numbers) for name, numbers in one["lines"].items()}
                self._known[one["key"]] = one["seconds"], lines

    def of(self, what: object) -> tuple[float, Lines] | None:
        """Seconds and lines of a case (or of whatever else has a telling repr)."""
        return self._known.get(self._key(what))

    def add(self, what: object, seconds: float, lines: Lines) -> None:
        """Keep them."""
        key = self._key(what)
        self._known[key] = seconds, lines
        plain = {name: sorted(numbers) for name, numbers in lines.items()}
        with self._file.open("a") as out:
            line = {"key": key, "seconds": round(seconds, 3), "lines": plain}
            out.write(json.dumps(line) + "\n")

    def _key(self, what: object) -> str:
        content = getattr(what, "content", "")
        return hashlib.sha256(f"{self._core} {what!r} {content}".encode()).hexdigest()[:24]
