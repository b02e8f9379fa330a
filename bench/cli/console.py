"""Printing: data to stdout, everything else to stderr.

A terminal would obey escape sequences in names and reasons out of files and records, so control
characters are made visible: in data by whoever renders it, in remarks here. Remarks and refusals
may quote what was written in a sweep file, so credentials are taken out.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from pathlib import Path
from typing import Any, TextIO

from bench.errors import UsageError
from bench.redaction import redact_text
from reports.renderers.printable import printable

_NOTED_EVERY_SECONDS = 10.0


def data(text: str) -> None:
    """A text to stdout, without changes; lost quietly if its reader has gone."""
    _print(text, sys.stdout)


def data_json(document: Any) -> None:
    """JSON to stdout. Not-a-number values become null, which JSON has."""
    data(json.dumps(_without_nan(document), indent=2, allow_nan=False, default=str))


def note(text: str) -> None:
    """A remark to the person at the terminal, to stderr; lost quietly if nobody listens."""
    _print(harmless(redact_text(text)), sys.stderr)


class ThrottledLog:
    """Remarks on how far something is, not more often than people read."""

    def __init__(self) -> None:
        self._last = time.monotonic()

    def say(self, text: str, *, now: bool = False) -> None:
        """Note it `now`, or if nothing was noted for a while."""
        if now or time.monotonic() - self._last > _NOTED_EVERY_SECONDS:
            self._last = time.monotonic()
            note(text)


def waiting(text: str) -> None:
    """What is being waited for, on a terminal alone; the next call replaces it, "" removes it."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\x1b[K{harmless(text)}")
        sys.stderr.flush()


def harmless(text: str) -> str:
    """`text` with control characters made visible, line by line."""
    return "\n".join(printable(line) for line in text.split("\n"))


def _print(text: str, stream: TextIO) -> None:
    try:
        print(text, file=stream, flush=True)
    except BrokenPipeError:
        silence(stream)


def write_file(path: Path, content: str | bytes) -> None:
    """A file that an option named, with its folder.

    Raises:
        UsageError: it cannot be written.
        StoreFullError: no space.
    """
    from bench.store.atomic import reporting_failed_writes, write_text_atomically

    try:
        with reporting_failed_writes(path):
            path.absolute().parent.mkdir(parents=True, exist_ok=True)
            write_text_atomically(path.absolute(), content)
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}; name another file") from error


def error(text: str) -> None:
    """A refusal or failure, to stderr."""
    note(f"error: {text}")


def silence(stream: TextIO) -> None:
    """Point a broken stream at nothing, so that the interpreter's last flush does not fail."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())


def _without_nan(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {str(key): _without_nan(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(item) for item in value]
    return value
