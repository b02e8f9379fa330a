"""What a verb answers, and printing: data to stdout, everything else to stderr.

Texts hold names and reasons out of files and records. A terminal would obey escape sequences in
them, so control characters are made visible; JSON escapes its own, logs are printed as they are.
Remarks and refusals may quote what was written in a sweep file, so credentials are taken out.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from bench.cli.exit_codes import OK
from bench.redaction import redact_text

_NOTED_EVERY_SECONDS = 10.0


def data(text: str) -> None:
    """One piece of what was asked for, to stdout; lost quietly if its reader has gone."""
    raw(harmless(text))


def raw(text: str) -> None:
    """As `data`, character by character: the content of a log."""
    _print(text, sys.stdout)


def data_json(document: Any) -> None:
    """What was asked for as JSON, to stdout. Not-a-number values become null, which JSON has."""
    raw(json.dumps(_without_nan(document), indent=2, allow_nan=False, default=str))


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
    from reports.renderers.printable import printable

    return "\n".join(printable(line) for line in text.split("\n"))


def _print(text: str, stream: TextIO) -> None:
    try:
        print(text, file=stream, flush=True)
    except BrokenPipeError:
        silence(stream)


def write_file(path: Path, text: str) -> None:
    """A file that an option named, with its folder.

    Raises:
        UsageError: it cannot be written.
        StoreFullError: no space.
    """
    from bench.store.atomic import write_text_atomically

    with _named_by_option(path):
        write_text_atomically(path.absolute(), text)


def append_to_file(path: Path, lines: str) -> None:
    """As `write_file`, at the end of what is there then: others may have added theirs meanwhile."""
    text = lines.encode()
    with _named_by_option(path), path.open("a+b", buffering=0) as stream:
        if stream.tell() and text:
            stream.seek(-1, os.SEEK_END)
            text = text if stream.read(1) == b"\n" else b"\n" + text
        while text:
            text = text[stream.write(text) :]


@contextlib.contextmanager
def _named_by_option(path: Path) -> Iterator[None]:
    from bench.errors import UsageError
    from bench.store.atomic import reporting_failed_writes

    try:
        with reporting_failed_writes(path):
            path.absolute().parent.mkdir(parents=True, exist_ok=True)
            yield
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}; name another file") from error


def error(text: str) -> None:
    """A refusal or failure, to stderr."""
    note(f"error: {text}")


def silence(stream: TextIO) -> None:
    """Point a broken stream at nothing, so that the interpreter's last flush does not fail."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())


def columns(
    head: Sequence[str], rows: Sequence[tuple[str, ...]], *, left: int | None = None
) -> str:
    """Rows as aligned plain text; the first `left` columns (default all) align left."""
    from reports.renderers.table import Table
    from reports.renderers.terminal import table

    return table(Table.of(head, rows, left=len(head) if left is None else left))


def _without_nan(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {str(key): _without_nan(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(one) for one in value]
    return value


@dataclass(frozen=True)
class Answer:
    """Of the two forms only the one that is asked for is made.

    remarks: to stderr, behind it. as_it_is: the text is a log, whose characters stay. as_json: the
    form that was asked for. failure: of a later step (a report on runs that are made); it is told
    behind what there is, and `code` and `document` count it.
    """

    document: Callable[[], Any]
    text: Callable[[], str]
    code: int = OK
    remarks: tuple[str, ...] = ()
    as_it_is: bool = False
    as_json: bool = False
    failure: Exception | None = None

    def show(self) -> int:
        """Print it, and return the exit code."""
        if self.as_json:
            data_json(self.document())
        elif text := self.text().rstrip("\n"):
            (raw if self.as_it_is else data)(text)
        for line in self.remarks:
            note(line)
        return self.code
