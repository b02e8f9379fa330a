"""Finding NCCL's own prefix in a line that launchers, collectors and terminals have decorated.

    [TS]HOST:PID:TID [DEV] NCCL INFO MESSAGE
    [TS]HOST:PID:TID [DEV] FILE:LINE (FUNC) NCCL WARN MESSAGE

Time stamps can be any text, so the prefix is never anchored at the start of the line. It is found
by its literal middle and then read backwards, which takes time proportional to its length whatever
the line holds.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

INFO: Final = b" NCCL INFO "
WARN: Final = b" NCCL WARN "
_MARKS: Final = re.compile(rb" NCCL (?:INFO|WARN) ")
_WINDOW_BYTES: Final = 400

# Read backwards from the end of the prefix: `]3[ 845:123:tsoh`.
_REVERSED_INFO: Final = re.compile(
    rb"\](\d{1,4}-?)\[ (\d{1,10}):(\d{1,10}):([A-Za-z0-9._-]{1,255})"
)
_REVERSED_WARN: Final = re.compile(
    rb"(?:\)[^() \t]{1,80}\( )?\d{1,6}:[^ \t:]{1,120} \](\d{1,4}-?)\[ (\d{1,10}):(\d{1,10}):"
    rb"([A-Za-z0-9._-]{1,255})"
)
_ESCAPES: Final = re.compile(rb"(?:\x1b|\xef\xbf\xbd|\xc2\x9b)\[[0-9;?]{0,16}[A-Za-z]")
# Some log drivers write these characters so inside JSON strings.
_JSON_ESCAPES: Final = (
    (b"\\u003e", b">"),
    (b"\\u003c", b"<"),
    (b"\\u0026", b"&"),
    (b"\\u001b", b"\x1b"),
)
_REPEATED: Final = re.compile(rb"[ \t]*\[repeated (\d{1,9})x across cluster\].*\Z", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Header:
    """Where NCCL's prefix starts and its message begins (offsets into the line)."""

    host: bytes
    pid: bytes
    tid: bytes
    device: bytes
    start: int
    message: int
    warning: bool


# Pieces of NCCL's own messages: where they stand before a prefix, the line was cut and glued.
_FRAGMENT: Final = re.compile(
    rb"Bytes|Algo |proto |channel\{|Kernel |nthreads|nchannels|nWorks|opCount|sendbuff|recvbuff"
    rb"|datatype|comm 0x|NCCL |stream 0x|\[nranks=|\[Symmetric\]|\[Copy Engine\]|register "
    rb"|(?:All|Reduce|Broadcast|Send|Recv)\w*: |\{\d+\.\."
)


def is_fragment(text: bytes) -> bool:
    """Whether text before a prefix is part of a message rather than a decoration."""
    return _FRAGMENT.search(text) is not None


def clean_header(line: bytes, mark: int) -> Header | None:
    """The prefix that ends at `mark`, the offset of INFO, if only decoration precedes it."""
    match = _REVERSED_INFO.match(line[max(0, mark - _WINDOW_BYTES) : mark][::-1])
    if match is None or mark > _WINDOW_BYTES:
        return None
    start = mark - match.end()
    if start and (line.find(b"\x1b", 0, start) >= 0 or is_fragment(line[:start])):
        return None
    device, tid, pid, host = (part[::-1] for part in match.groups())
    return Header(host, pid, tid, device, start, mark + len(INFO), warning=False)


def plain(line: bytes) -> bytes:
    """`line` without terminal colours and without a carriage return at its end."""
    if b"\\u00" in line:
        for escape, byte in _JSON_ESCAPES:
            line = line.replace(escape, byte)
    if b"\x1b" in line or b"\xef\xbf\xbd" in line or b"\xc2\x9b" in line:
        line = _ESCAPES.sub(b"", line)
    return line.rstrip(b"\r\n")


def without_repetition(message: bytes) -> tuple[bytes, int]:
    """The message without Ray's note that it stood for several lines, and how many those were."""
    if b" across cluster]" not in message:
        return message, 0
    match = _REPEATED.search(message)
    if match is None:
        return message, 0
    return message[: match.start()], int(match.group(1))


def headers(line: bytes) -> Iterator[Header]:
    """Every prefix in the line, first to last; more than one means that lines were glued."""
    last = 0
    for mark in _MARKS.finditer(line):
        warning = line.startswith(WARN, mark.start())
        window = line[max(last, mark.start() - _WINDOW_BYTES) : mark.start()][::-1]
        match = (_REVERSED_WARN if warning else _REVERSED_INFO).match(window)
        if match is None:
            continue
        device, tid, pid, host = (part[::-1] for part in match.groups())
        start = mark.start() - match.end()
        yield Header(host, pid, tid, device, start, mark.end(), warning)
        last = mark.end()


def unescaped(message: bytes) -> bytes | None:
    """The message inside a JSON string or quotes (docker and Kubernetes log files), if it is one.

    NCCL prints no double quote and no backslash in the messages that carry evidence.
    """
    cut = min((i for i in (message.find(b"\\n"), message.find(b'"')) if i >= 0), default=-1)
    return message[:cut] if cut > 0 else None
