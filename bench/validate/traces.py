"""Where an engine was when it failed: by its stack, and by what its rank has written before."""

from __future__ import annotations

import re
import sys
from collections import deque
from collections.abc import Iterable
from pathlib import Path

#: Frames that are told, innermost first.
_MOST = 4
_LAST_EVENTS = 5
#: How the log of a case, or of a program, begins.
BUILDING = "in building"
#: What Python writes before the stack of a process that a signal ends.
_FATAL = "Fatal Python error"
_HARNESS = str(Path(__file__).parents[1])
_CORE = "/mfsdp_core/"
_LIBRARY = re.compile(r"/site-packages/torch/|/lib/python[\d.]+/[^/]+$")
_FRAME = re.compile(r'File "([^"]+)", line (\d+),? in (\S+)')
_EXCEPTION = re.compile(r"([A-Za-z_][\w.]*\.)?[A-Z]\w*(: .*)?$")
#: What this rank has written lately.
_SAID: deque[str] = deque(maxlen=200)
_TRACEBACK = "Traceback (most recent call last)"


def say(part: str) -> None:
    """Into the log of this rank: a part of its work begins."""
    _write(f"in {part}")


def say_event(event: str) -> None:
    """Into the log of this rank: something that the engine does."""
    _write(f"last: {event}")


def own_last_words() -> tuple[str, ...]:
    """What `last_words` would say of this rank."""
    return last_words(_SAID)


def _write(line: str) -> None:
    """At once, since a process that is killed flushes nothing."""
    _SAID.append(line)
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def last_words(log: Iterable[str]) -> tuple[str, ...]:
    """Of the log of a rank: the part that it began last, its last events, and its stack."""
    said = [*log]
    built = max((n for n, line in enumerate(said) if line.startswith(BUILDING)), default=0)
    said = said[built:]
    fatal = next((n for n, line in enumerate(said) if line.startswith(_FATAL)), len(said))
    begun = [line for line in said[:fatal] if line.startswith("in ")]
    events = [line for line in said[:fatal] if line.startswith("last: ")]
    return (*begun[-1:], *events[-_LAST_EVENTS:], *frames_of("\n".join(said[fatal:])))


def exception_of(text: str) -> str:
    """Type and first line of the exception that a traceback ends with.

    A message may have more lines, such as advice.
    """
    lines = text.strip().splitlines()
    begin = max((n for n, line in enumerate(lines) if line.startswith(_TRACEBACK)), default=-1)
    said = [line for line in lines[begin + 1 :] if not line.startswith(" ")]
    return next((line for line in said if _EXCEPTION.match(line)), lines[-1] if lines else "")


def frames_of(text: str) -> tuple[str, ...]:
    """Where the engine was, innermost first: frames of the core, else of whatever is not harness.

    text: a traceback, or what faulthandler writes.
    """
    frames = _FRAME.findall(text)
    if _TRACEBACK in text:
        begin = text.rindex(_TRACEBACK)
        frames = _FRAME.findall(text[begin:])[::-1]
    others = [frame for frame in frames if not frame[0].startswith(_HARNESS)]
    core = [frame for frame in frames if _CORE in frame[0]]
    own = core or [frame for frame in others if not _LIBRARY.search(frame[0])] or others
    return tuple(f"at {_short(file)}:{line} in {name}" for file, line, name in own[:_MOST])


def _short(file: str) -> str:
    """From the package on."""
    if _CORE in file:
        return f"mfsdp_core/{file.rpartition(_CORE)[2]}"
    return file.rpartition("/site-packages/")[2]
