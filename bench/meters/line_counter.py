"""Counts the Python lines that an engine's own files execute, by function: loops that call nothing.

By the trace function of threads, on every version of Python: it is told each line that begins, and
each jump back on a line. A function that waits for other ranks in a loop turns as often as it has
to: what is in `WAITS`, and whatever runs below it, is left out.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any, Final

from bench.meters.call_sites import CallSites, is_of_engine

#: Sites that wait for other ranks, by how they begin: the transport of mfsdp within a host.
WAITS: Final = ("mfsdp_core/comm/host_connections.py:",)

Tracer = Callable[[FrameType, str, Any], Any]


class LineCounter:
    """`watch` in every thread that counts; `lines` and `first_line` by site."""

    def __init__(self, sites: CallSites) -> None:
        self._sites = sites
        self._tracers: dict[CodeType, Tracer | None] = {}
        self._local = threading.local()
        self._active = False
        self.lines: dict[str, int] = {}
        self.first_line: dict[str, int] = {}

    def start(self) -> None:
        """Count from now on."""
        self._active = True

    def watch(self) -> None:
        """Of this thread, every function that is entered from now on."""
        self._local.waiting = None
        sys.settrace(self._enter)

    def stop(self) -> None:
        """Other threads stop at their next call."""
        self._active = False

    def _enter(self, frame: FrameType, event: str, argument: Any) -> Tracer | None:
        del event, argument
        if not self._active:
            sys.settrace(None)
            return None
        if self._local.waiting is not None:
            return None
        code = frame.f_code
        if code not in self._tracers:
            self._tracers[code] = self._tracer(code)
        tracer = self._tracers[code]
        if tracer == self._left:
            self._local.waiting = frame
        return tracer

    def _tracer(self, code: CodeType) -> Tracer | None:
        site = self._sites.of_code(code)
        if site is None or not is_of_engine(site):
            return None
        if site.startswith(WAITS):
            return self._left
        self.lines.setdefault(site, 0)
        self.first_line.setdefault(site, code.co_firstlineno)
        lines = self.lines

        def count(frame: FrameType, event: str, argument: Any) -> Tracer:
            del frame, argument
            if event == "line":
                lines[site] += 1
            return count

        return count

    def _left(self, frame: FrameType, event: str, argument: Any) -> Tracer:
        """Of a function that waits: nothing counts until it returns."""
        del argument
        frame.f_trace_lines = False
        if event == "return" and frame is self._local.waiting:
            self._local.waiting = None
        return self._left
