"""Counts the Python lines that an engine's own files execute, by function: loops that call nothing.

By the trace function of threads, on every version of Python: it hears of each line that begins, and
each jump back on a line.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

from bench.meters.call_sites import CallSites, is_of_engine

Tracer = Callable[[FrameType, str, Any], Any]


class LineCounter:
    """`watch` in every thread that counts; `lines` and `first_line` by site."""

    def __init__(self, sites: CallSites) -> None:
        self._sites = sites
        self._tracers: dict[CodeType, Tracer | None] = {}
        self._active = False
        self.lines: dict[str, int] = {}
        self.first_line: dict[str, int] = {}

    def start(self) -> None:
        """Count from now on."""
        self._active = True

    def watch(self) -> None:
        """Of this thread, every function that is entered from now on."""
        sys.settrace(self._enter)

    def stop(self) -> None:
        """Other threads stop at their next call."""
        self._active = False

    def _enter(self, frame: FrameType, event: str, argument: Any) -> Tracer | None:
        del event, argument
        if not self._active:
            sys.settrace(None)
            return None
        code = frame.f_code
        if code not in self._tracers:
            self._tracers[code] = self._tracer(code)
        return self._tracers[code]

    def _tracer(self, code: CodeType) -> Tracer | None:
        site = self._sites.of_code(code)
        if site is None or not is_of_engine(site):
            return None
        self.lines.setdefault(site, 0)
        self.first_line.setdefault(site, code.co_firstlineno)
        lines = self.lines

        def count(frame: FrameType, event: str, argument: Any) -> Tracer:
            del frame, argument
            if event == "line":
                lines[site] += 1
            return count

        return count
