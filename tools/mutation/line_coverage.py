"""Which lines of mfsdp_core a call on a rank executes."""

from __future__ import annotations

import hashlib
import json
import sys
import threading
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from bench.testing.call import FunctionCall
from bench.validate.patched_core import CORE

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
        #: By code that was entered: lines that were not, or None for code of others.
        self._left: dict[CodeType, set[int] | None] = {}

    @property
    def lines(self) -> Lines:
        """By file below mfsdp_core."""
        found: Lines = {}
        for code, left in list(self._left.items()):
            if left is not None:
                found.setdefault(_file(code), set()).update(_lines(code) - left)
        return found

    def start(self) -> None:
        """Lines count from now on, and none so far."""
        self._left = {}
        threading.settrace(self._enter)
        sys.settrace(self._enter)

    def stop(self) -> None:
        """No further line counts."""
        sys.settrace(None)
        threading.settrace(None)

    def _enter(self, frame: FrameType, _event: str, _argument: object) -> Any:
        code = frame.f_code
        if code not in self._left:
            self._left[code] = {*_lines(code)} - {frame.f_lineno} if _file(code) else None
        # Code of which every line was executed is not looked at again: this is most of the time.
        return self._step if self._left[code] else None

    def _step(self, frame: FrameType, event: str, _argument: object) -> Any:
        left = self._left.get(frame.f_code)
        if event == "line" and left:
            left.discard(frame.f_lineno)
        return self._step


@cache
def _file(code: CodeType) -> str:
    return code.co_filename.partition("/mfsdp_core/")[2]


@cache
def _lines(code: CodeType) -> frozenset[int]:
    return frozenset(line for _, _, line in code.co_lines() if line)


def traced(call: FunctionCall) -> Lines:
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
    """Lines that each case executes, kept in a file of JSON lines: a run adds what is missing.

    A line counts for one state of the core.
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
        return hashlib.sha256(f"{self._core} {what!r}".encode()).hexdigest()[:24]
