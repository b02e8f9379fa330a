"""One stream into timelines: the only place that runs once per line.

Most lines of a log repeat, so a TUNING line that was seen before is found by one look-up of the
whole line. Every other line is searched for prefixes, and each message is tried form by form.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from reports.nccl import grammar
from reports.nccl.grammar import Header
from reports.nccl.model import MAX_QUOTE_CHARACTERS, Choice, StateChange, Unread
from reports.nccl.source import LONGEST_LINE_BYTES, LogSource, StoppedError, read_lines
from reports.nccl.timeline import Thread, Timeline

MOST_ITERATIONS: Final = 64
_MOST_KNOWN: Final = 40_000

# What trainers print at the end of an iteration (Megatron-LM and its kin, torchtitan).
_ITERATION: Final = re.compile(
    rb"(?<![\w.])iteration\s{1,20}(\d{1,9})\s{0,4}/\s{0,20}\d{1,12}\s{0,4}\|"
    rb"|(?<![\w.])step:\s{0,20}(\d{1,9})\s{1,20}loss:"
)
_BARE_VERSION: Final = re.compile(r"NCCL version (\d+\.\d+\.\d+)(?!\d)")
_EVIDENCE: Final = re.compile(
    rb" Bytes -> |NCCL INFO|NCCL WARN|: opCount |\[Symmetric\]: |\[Copy Engine\]: |\[nranks=\d"
)
# Other people's text is most of some logs: a line without any of these is no evidence.
_NOTABLE: Final = tuple(
    b"NCCL,iteration,step:,Bytes ->,opCount,nranks=,[Symmetric]: ,[Copy Engine]: ".split(b",")
)
_STATE_KINDS: Final = frozenset(kind for kind, _ in grammar.STATE_EVENTS)

Marks = tuple[tuple[int, int], ...]
Known = tuple[Timeline, Thread, Choice, bytes]
"""What a TUNING line says, whenever it occurs: who printed it, the choice, its text."""


@dataclass
class StreamReader:
    """Facts of one stream.

    timelines: by process, `host:pid`. stray: lines about every process of the stream. pasted:
    TUNING lines without the prefix of a process. iteration: iterations that have ended; None before
    the first boundary. hosts: names at the beginning of lines, by which glued lines are told apart.
    problems: why reading ended early.
    """

    timelines: dict[bytes, Timeline] = field(default_factory=dict)
    stray: Timeline = field(default_factory=Timeline)
    pasted: Timeline = field(default_factory=Timeline)
    iteration: int | None = None
    unread: Unread = field(default_factory=Unread)
    hosts: set[bytes] = field(default_factory=set)
    bytes_read: int = 0
    problems: list[str] = field(default_factory=list)
    _known: dict[bytes, Known] = field(default_factory=dict)
    _begun: bytes = b""

    def feed(self, piece: bytes) -> None:
        """Read a line with its end, or take a piece of a long one.

        NUL bytes, which a truncated or sparse file is full of, are dropped. Where a very long line
        has carriage returns (progress bars), those end its lines.
        """
        self.bytes_read += len(piece)
        known = self._known.get(piece)
        if known is not None and not self._begun:
            timeline, thread, choice, text = known
            timeline.add_choice(thread, choice, text)
            return
        line = self._begun + piece.replace(b"\0", b"")
        self._begun = b""
        if line.endswith(b"\n"):
            known = self._read(line[:-1])
            if known is not None and len(self._known) < _MOST_KNOWN:
                self._known[piece] = known
            return
        *lines, rest = line.split(b"\r") if len(line) > LONGEST_LINE_BYTES else [line]
        for one in lines:
            self._read(one)
        self._begun = rest[: LONGEST_LINE_BYTES + 1]

    def finish(self) -> StreamReader:
        """End what is open, and decide what lines without a prefix are.

        In a log, one with damaged lines above all, such a line may be the end of another one.
        """
        if self._begun:
            self._read(self._begun)
        for timeline in self.timelines.values():
            timeline.close()
        if self.timelines:
            self._doubt_pasted()
        return self

    def _doubt_pasted(self) -> None:
        damaged = self.unread.damaged > 0
        for tally in self.pasted.tallies():
            for observation, seen in list(tally.items()):
                choice = observation.choice
                if damaged or choice is None or grammar.may_be_cut(choice):
                    del tally[observation]
                    self.pasted.lines -= seen.count
                    self.unread.add_damaged(seen.line.encode(), seen.count)

    def reach(self, iteration: int) -> None:
        """`iteration` iterations have ended before the next line of the stream."""
        if iteration != self.iteration:
            self.iteration = iteration
            for timeline in self.timelines.values():
                timeline.change(StateChange("iteration", "", (str(iteration),), ""))

    def _read(self, text: bytes) -> Known | None:
        """One line as it stands in the stream, with all that may have happened to it.

        Returns what to do when it comes again, if it is one TUNING line and nothing else.
        """
        if len(text) > LONGEST_LINE_BYTES:
            self.unread.overlong += 1
            return None
        if not any(word in text for word in _NOTABLE):
            self.unread.ignored += 1
            return None
        known = None
        pieces = grammar.plain(text).split(b"\r")
        for piece in pieces:
            found = list(grammar.headers(piece)) if b" NCCL " in piece else []
            if found:
                known = self._read_headed(piece, found)
            else:
                self._read_bare(piece)
        return known if len(pieces) == 1 else None

    def _read_headed(self, line: bytes, found: list[Header]) -> Known | None:
        """Each message goes from its prefix to the next one; only the last is not cut."""
        hosts = [self._host(line, i, header) for i, header in enumerate(found)]
        starts = [
            header.start + len(header.host) - len(host or b"")
            for header, host in zip(found, hosts, strict=True)
        ]
        whole = not grammar.is_fragment(line[: starts[0]])
        if not whole:
            self.unread.add_damaged(line[: starts[0]])
        known = None
        for header, host, end in zip(found, hosts, [*starts[1:], len(line)], strict=True):
            text = line[header.start : end]
            if host is None:
                self.unread.add_damaged(text)
            else:
                known = self._understand(header, host, line[header.message : end], text)
        return known if whole and len(found) == 1 else None

    def _host(self, line: bytes, index: int, header: Header) -> bytes | None:
        """The host of a prefix. Behind a fragment it must be one that is known from elsewhere."""
        if index == 0 and not grammar.is_fragment(line[: header.start]):
            self.hosts.add(header.host)
        if header.host in self.hosts:
            return header.host
        known = [host for host in self.hosts if header.host.endswith(host)]
        return max(known, key=len, default=None)

    def _timeline(self, header: Header, host: bytes) -> Timeline:
        """Of the process of a prefix; `host` may be shorter where lines were glued."""
        key = host + b":" + header.pid
        timeline = self.timelines.get(key)
        if timeline is None:
            timeline = self.timelines[key] = Timeline(device=header.device.decode())
            if self.iteration is not None:
                timeline.change(StateChange("iteration", "", (str(self.iteration),), ""))
        return timeline

    def _understand(self, header: Header, host: bytes, message: bytes, text: bytes) -> Known | None:
        timeline = self._timeline(header, host)
        thread = timeline.threads.setdefault(header.tid, Thread())
        message, repeated = grammar.without_repetition(message)
        timeline.deduplicated += repeated
        if not header.warning:
            choice = grammar.tuning(message) if b" Bytes -> " in message else None
            if choice is not None:
                timeline.add_choice(thread, choice, text)
                return None if repeated else (timeline, thread, choice, text)
            call = grammar.call(message) if b": opCount " in message else None
            if call is not None:
                timeline.add_call(thread, *call, text)
                return None
        timeline.lines += 1
        shown = message.decode("utf-8", "replace")
        for event in _statements(shown.strip(), text, header):
            (timeline.change if event.kind in _STATE_KINDS else timeline.describe)(event)
            return None
        if _EVIDENCE.search(message) is not None:
            self.unread.add_damaged(text)
        elif grammar.is_unused(shown):
            self.unread.ignored += 1
        else:
            self.unread.add_unknown(shown)
        return None

    def _read_bare(self, line: bytes) -> None:
        """A line without NCCL's prefix."""
        if b"NCCL version " in line:
            shown = line.decode("utf-8", "replace")
            match = _BARE_VERSION.search(shown)
            if match is not None:
                self.stray.describe(StateChange("version", "", match.groups(), _quoted(line)))
                return
        iteration = _ITERATION.search(line)
        if iteration is not None:
            ended = int(iteration.group(1) or iteration.group(2))
            if ended <= MOST_ITERATIONS:
                self.reach(ended)
        elif _EVIDENCE.search(line) is not None:
            choice = grammar.pasted(line)
            if choice is None:
                self.unread.add_damaged(line)
            else:
                self.pasted.add_choice(Thread(), choice, line)
            return
        self.unread.ignored += 1


def _statements(message: str, text: bytes, header: Header) -> Iterator[StateChange]:
    """Lines about the state of the process."""
    tables = (grammar.STATE_EVENTS, grammar.PROCESS_EVENTS, grammar.WARNINGS)
    for table in (tables[2], tables[1]) if header.warning else tables:
        found = grammar.find_event(message, table)
        if found is not None:
            yield StateChange(found[0], header.tid.decode(), found[1], _quoted(text))


def _quoted(text: bytes) -> str:
    return text.decode("utf-8", "replace").strip()[:MAX_QUOTE_CHARACTERS]


def read_source(source: LogSource, marks: Marks = ()) -> StreamReader:
    """Read a stream to its end, or to where it cannot be read on.

    Args:
        source: what to read.
        marks: (offset, iterations ended) as the run itself has noted them.
    """
    reader, left = StreamReader(), list(marks)
    try:
        for piece in read_lines(source):
            while left and left[0][0] <= reader.bytes_read:
                reader.reach(left.pop(0)[1])
            reader.feed(piece)
    except StoppedError as error:
        reader.problems.append(f"{source.name}: {error}")
    return reader.finish()
