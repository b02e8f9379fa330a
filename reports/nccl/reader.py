"""One stream into processes: the only place that runs once per line."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Final

from reports.nccl import events
from reports.nccl.events import (
    COLLECTIVES,
    FRAGMENT,
    HEADER,
    MAX_QUOTE_CHARACTERS,
    Fact,
    StateChange,
)
from reports.nccl.inspector import InspectorTimes
from reports.nccl.source import LONGEST_LINE_BYTES, LogSource, StoppedError, read_lines
from reports.nccl.timeline import Process

MOST_ITERATIONS: Final = 64
# More distinct lines of a stream than this are not known again.
_MOST_KNOWN: Final = 40_000
_MOST_SHAPES: Final = 500
_SHOWN_CHARACTERS: Final = 160
_SHOWN_DAMAGED: Final = 3
_SHORTEST_CUT: Final = 3
_WORD: Final = re.compile(r"[A-Za-z]{2,40}")
_NUMBER: Final = re.compile(r"0x[0-9a-fA-F]+|\d+(?:\.\d+)?")
# What trainers print at the end of an iteration (Megatron-LM and its kin, torchtitan).
_ITERATION: Final = re.compile("|".join(events.LINES["iterations"]).encode())
_BARE_VERSION: Final = re.compile(rb"NCCL version (\d+\.\d+\.\d+)(?!\d)")
_EVIDENCE: Final = re.compile("|".join(events.LINES["evidence"]).encode())
# Other people's text is most of some logs: a line without any of these is no evidence.
_NOTABLE: Final = re.compile("|".join(events.LINES["notable"]).encode())
_INSPECTOR: Final = re.compile(rb'"coll|"n_ranks|coll_perf')
# Of the text and of the JSON form.
_RAS: Final = re.compile(rb'Communicators\.\.\. \(|"communicators_count"|"missing_ranks_count"')

Marks = tuple[tuple[int, int], ...]
Key = bytes | tuple[bytes, bytes]
"""A line that repeats; what stands before and behind what varies in a COLL line."""
Known = tuple[Process, bytes, Fact, int]
"""Of such a line: process, thread, what it states, and where the prefix begins."""


def operations_named(text: bytes) -> set[str]:
    """Operations that a piece of a line may be about; its first and last word may be cut."""
    shown = text.decode("ascii", "replace").strip()
    operations: set[str] = set()
    for match in _WORD.finditer(shown):
        word = match.group()
        long = len(word) >= _SHORTEST_CUT
        first, last = long and match.start() == 0, long and match.end() == len(shown)
        operations |= {
            name
            for name in COLLECTIVES
            if name == word or (first and name.endswith(word)) or (last and name.startswith(word))
        }
    return operations


@dataclass
class Unread:
    """Counts of lines that carry no fact.

    ignored: text without a NCCL prefix, and NCCL messages that are known to carry no evidence.
    damaged: pieces of lines that were cut, glued or overwritten; damaged_until: by operation that
    such a piece names, how many iterations had ended at the last. overlong: lines beyond the
    longest that is read. unknown: NCCL messages of other forms, by shape (numbers replaced).
    """

    ignored: int = 0
    damaged: int = 0
    damaged_until: dict[str, int] = field(default_factory=dict)
    overlong: int = 0
    unknown: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)
    damaged_examples: list[str] = field(default_factory=list)

    def add_unknown(self, message: str) -> None:
        """Count a message by its shape."""
        shape = _NUMBER.sub("#", message)[:_SHOWN_CHARACTERS]
        if shape not in self.unknown and len(self.unknown) >= _MOST_SHAPES:
            shape = "(other forms)"
        self.unknown[shape] += 1
        self.examples.setdefault(shape, message[:_SHOWN_CHARACTERS])

    def add_damaged(self, text: bytes, iteration: int, count: int = 1) -> None:
        """Count pieces of lines that cannot be trusted; so many iterations had ended."""
        self.damaged += count
        for operation in operations_named(text):
            self.damaged_until[operation] = max(iteration, self.damaged_until.get(operation, 0))
        shown = text[:_SHOWN_CHARACTERS].decode("utf-8", "replace")
        self.damaged_examples += [shown] * min(count, _SHOWN_DAMAGED - len(self.damaged_examples))


@dataclass
class StreamReader:
    """Facts of one stream, `source`. `unread` counts what all streams hold besides them.

    processes: by name, `host:pid`. stray: lines about every process of the stream. pasted: lines
    without the prefix of a process, by device. iteration: iterations that have ended; None before
    the first boundary. hosts: names at the beginning of lines, by which glued lines are parted.
    bytes_read: before the next line. problems: why reading ended early. times: of all streams. ras:
    whether it holds a report of RAS.
    """

    source: str
    unread: Unread
    times: InspectorTimes = field(default_factory=InspectorTimes)
    ras: bool = False
    processes: dict[str, Process] = field(default_factory=dict)
    stray: Process = field(default_factory=Process)
    pasted: dict[bytes, Process] = field(default_factory=dict)
    iteration: int | None = None
    hosts: set[bytes] = field(default_factory=set)
    bytes_read: int = 0
    problems: list[str] = field(default_factory=list)
    _begun: bytes = b""
    _known: dict[Key, Known] = field(default_factory=dict)
    _damaged_before: int = field(init=False)

    def __post_init__(self) -> None:
        self._damaged_before = self.unread.damaged

    def feed(self, piece: bytes) -> None:
        """Read a line with its end, or take a piece of a long one.

        NUL bytes, which a truncated or sparse file is full of, are dropped. Where a very long line
        has carriage returns (progress bars), those end its lines.
        """
        line = self._begun + piece.replace(b"\0", b"")
        self.bytes_read += len(piece)
        if line.endswith(b"\n"):
            self._begun = b""
            self._read(line[:-1])
            return
        *lines, rest = line.split(b"\r") if len(line) > LONGEST_LINE_BYTES else [line]
        for part in lines:
            self._read(part)
        self._begun = rest[: LONGEST_LINE_BYTES + 1]

    def finish(self) -> StreamReader:
        """End what is open, and decide what lines without a prefix are.

        In a log, one with damaged lines above all, such a line may be the end of another one.
        """
        if self._begun:
            self._read(self._begun)
        self.times.close()
        for process in (*self.processes.values(), *self.pasted.values()):
            process.close()
        damaged = self.unread.damaged > self._damaged_before
        for process in self.pasted.values():
            for interval in process.intervals():
                for key, seen in list(interval.items()):
                    cut = seen.choice is not None and seen.choice.cut
                    odd = damaged or cut or not seen.choice or events.may_be_cut(seen.choice)
                    if (self.processes and odd) or (damaged and cut):
                        del interval[key]
                        process.lines -= seen.times
                        self._damage((seen.line or seen.call_line).encode(), seen.times)
        return self

    def reach(self, iteration: int) -> None:
        """`iteration` iterations have ended before the next line of the stream."""
        if iteration != self.iteration:
            self.iteration = iteration
            for process in (*self.processes.values(), *self.pasted.values()):
                process.change(StateChange("iteration", "", (str(iteration),), ""))

    def _damage(self, text: bytes, count: int = 1) -> None:
        self.unread.add_damaged(text, self.iteration or 0, count)

    def _read(self, text: bytes) -> None:
        """One line as it stands in the stream, with all that may have happened to it."""
        key: Key = text
        known, buffers = self._known.get(key), None
        if known is None and (call := events.VARYING.search(text)) is not None:
            key, buffers = (text[: call.start()], text[call.end() :]), (call[1], call[2])
            known = self._known.get(key)
        if known is not None:
            process, thread, fact, start = known
            process.lines += 1
            process.add(thread, fact, buffers, text[start:])
            return
        if len(text) > LONGEST_LINE_BYTES:
            self.unread.overlong += 1
            return
        if b'"' in text or b"(" in text:
            if _INSPECTOR.search(text) and self.times.read(text):
                return
            self.ras |= _RAS.search(text) is not None
        if not _NOTABLE.search(text):
            self.unread.ignored += 1
            return
        pieces = events.plain(text).split(b"\r")
        for piece in pieces:
            if headers := list(islice(HEADER.finditer(piece), piece.count(b" NCCL "))):
                known = self._read_headed(piece, headers)
            else:
                self._read_bare(piece)
        if known is not None and pieces == [text] and len(self._known) < _MOST_KNOWN:
            self._known[key] = known

    def _read_headed(self, line: bytes, headers: list[re.Match[bytes]]) -> Known | None:
        """Each message goes from its prefix to the next one; only the last is not cut.

        Behind a fragment, the end of a host counts where it is known from elsewhere. Returns what
        the line always says, if it is one TUNING or COLL line and nothing else.
        """
        cut = FRAGMENT.search(line, 0, headers[0].start()) is not None
        if not cut:
            self.hosts.add(headers[0]["host"])
        hosts = [self._known_host(header["host"]) for header in headers]
        starts = [h.end("host") - len(host) for h, host in zip(headers, hosts, strict=True)]
        if cut:
            self._damage(line[: starts[0]])
        known = None
        for header, host, end in zip(headers, hosts, [*starts[1:], len(line)], strict=True):
            text = line[header.start() : end]
            if not host:
                self._damage(text)
                continue
            name = (host + b":" + header["pid"]).decode()
            process = self.processes.get(name)
            if process is None:
                process = self.processes[name] = self._begun_now(name, header["device"])
            message, warning = line[header.end() : end], header["warning"] is not None
            fact = self._understand(process, header["tid"], message, text, warning=warning)
            known = None if fact is None else (process, header["tid"], fact, header.start())
        return None if cut or len(headers) > 1 else known

    def _known_host(self, host: bytes) -> bytes:
        """The longest known name at its end, "" if there is none."""
        if host in self.hosts:
            return host
        return max(filter(host.endswith, self.hosts), key=len, default=b"")

    def _begun_now(self, name: str, device: bytes) -> Process:
        process = Process(name, self.source, device.decode())
        if self.iteration is not None:
            process.change(StateChange("iteration", "", (str(self.iteration),), ""))
        return process

    def _understand(
        self,
        process: Process,
        thread: bytes,
        message: bytes,
        text: bytes,
        *,
        warning: bool,
        read: Callable[[bytes], events.Stated | None] = events.fact,
    ) -> Fact | None:
        """What a TUNING or COLL line states that stands for no others.

        thread: its id, empty where the line has no prefix. read: a TUNING or COLL line.
        """
        process.lines += 1
        message, repeated = events.without_repetition(message)
        process.deduplicated += repeated
        if not warning and (stated := read(message)) is not None:
            process.add(thread, *stated, text)
            return None if repeated else stated[0]
        shown = message.decode("utf-8", "replace")
        state = events.state_of(shown.strip(), warning=warning)
        if state is not None:
            event = StateChange(state[0], thread.decode(), state[1], _quoted(text))
            (process.change if event.kind in events.STATE_KINDS else process.describe)(event)
        elif _EVIDENCE.search(message) is not None:
            self._damage(text)
        elif events.is_unused(shown):
            self.unread.ignored += 1
        else:
            self.unread.add_unknown(shown)
        return None

    def _read_bare(self, line: bytes) -> None:
        """A line without NCCL's prefix."""
        if version := _BARE_VERSION.search(line):
            values = (version[1].decode(),)
            self.stray.describe(StateChange("version", "", values, _quoted(line)))
        elif iteration := _ITERATION.search(line):
            ended = int(iteration[1] or iteration[2])
            if ended <= MOST_ITERATIONS:
                self.reach(ended)
            self.unread.ignored += 1
        elif _EVIDENCE.search(line) is None:
            self.unread.ignored += 1
        elif (bare := events.headless(line)) is None:
            self._damage(line)
        else:
            process = self.pasted.get(bare.device)
            if process is None:
                process = self.pasted[bare.device] = self._begun_now("", bare.device)
            read = partial(events.pasted, marked=bare.marked)
            self._understand(process, b"", bare.message, line, warning=bare.warning, read=read)


def _quoted(text: bytes) -> str:
    return text.decode("utf-8", "replace").strip()[:MAX_QUOTE_CHARACTERS]


def read_source(
    source: LogSource, marks: Marks, unread: Unread, times: InspectorTimes
) -> StreamReader:
    """Read a stream to its end, or to where it cannot be read on.

    Args:
        source: what to read.
        marks: (offset, iterations ended) as the run itself has noted them.
        unread: counts of lines without a fact, over all streams.
        times: of collectives, over all streams.
    """
    reader, left = StreamReader(source.name, unread, times), list(marks)
    try:
        for piece in read_lines(source):
            while left and left[0][0] <= reader.bytes_read:
                reader.reach(left.pop(0)[1])
            reader.feed(piece)
    except StoppedError as error:
        reader.problems.append(f"{source.name}: {error}")
    return reader.finish()
