"""One stream into timelines: the only place that runs once per line.

Most lines of a log repeat, so a TUNING line seen before is found by one look-up of the whole line,
and while no call is open a block of such lines is counted without looking at their order. What is
new goes on: a clean prefix with a message of a known form; then what needs thought, which is
decorations, damage, state changes and other people's text.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from reports.nccl import grammar
from reports.nccl.grammar import Header
from reports.nccl.model import MAX_QUOTE_CHARACTERS, StateChange, Unread
from reports.nccl.source import (
    LONGEST_LINE_BYTES,
    LogSource,
    StoppedError,
    read_blocks,
    whole_lines,
)
from reports.nccl.timeline import CallLine, ChoiceLine, Thread, Timeline

MOST_ITERATIONS: Final = 64
_MOST_KNOWN: Final = 40_000
_LONGEST_KNOWN_BYTES: Final = 600

# What trainers print at the end of an iteration (Megatron-LM and its kin, torchtitan).
_ITERATION: Final = re.compile(
    rb"(?<![\w.])iteration\s{1,20}(\d{1,9})\s{0,4}/\s{0,20}\d{1,12}\s{0,4}\|"
    rb"|(?<![\w.])step:\s{0,20}(\d{1,9})\s{1,20}loss:"
)
_BARE_VERSION: Final = re.compile(r"NCCL version (\d+\.\d+\.\d+)(?!\d)")
_EVIDENCE: Final = re.compile(
    rb" Bytes -> |NCCL INFO|NCCL WARN|: opCount |\[Symmetric\]: |\[Copy Engine\]: |\[nranks=\d"
)
_NOTABLE: Final = tuple(
    b"NCCL,iteration,step:,Bytes ->,opCount,nranks=,[Symmetric]: ,[Copy Engine]: ".split(b",")
)
_STATE_KINDS: Final = frozenset(kind for kind, _ in grammar.STATE_EVENTS)

Marks = tuple[tuple[int, int], ...]
Origin = tuple[Timeline, Thread]


@dataclass(slots=True, eq=False)
class Known:
    """A TUNING line of a thread, whenever it occurs."""

    timeline: Timeline
    thread: Thread
    line: ChoiceLine


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

    def __post_init__(self) -> None:
        self._known: dict[bytes, Known] = {}
        self._counted: Counter[Known] = Counter()
        self._choices: dict[bytes, ChoiceLine] = {}
        self._origins: dict[bytes, Origin | None] = {}
        self._calls_seen = False

    def feed(self, block: bytes) -> None:
        """Read whole lines: `block` ends at the end of a line, or the stream does."""
        lines = block.split(b"\n")
        if not lines[-1]:
            lines.pop()
        if not self._calls_seen:
            try:
                self._counted.update(list(map(self._known.__getitem__, lines)))
            except KeyError:
                pass
            else:
                return
        self._settle()
        for text in lines:
            found = self._known.get(text)
            if found is None:
                self._read(text)
            else:
                found.timeline.add_choice(found.thread, found.line)

    def _settle(self) -> None:
        """Give what was counted to its processes, before anything else happens to them."""
        for known, count in self._counted.items():
            known.timeline.lines += count
            known.timeline.add_free(known.line, count)
        self._counted.clear()

    def finish(self) -> StreamReader:
        """End what is open, and decide what lines without a prefix are.

        In a log, one with damaged lines above all, such a line may be the end of another one.
        """
        self._settle()
        for timeline in self.timelines.values():
            timeline.close()
        pasted, self.pasted = self.pasted, Timeline()
        for tally in pasted.items:
            for observation, seen in tally.items() if isinstance(tally, dict) else ():
                choice = observation.choice
                if choice is None or (
                    self.timelines and (self.unread.damaged or grammar.may_be_cut(choice))
                ):
                    for _ in range(seen.count):
                        self.unread.add_damaged(seen.line.encode())
                else:
                    self.pasted.lines += seen.count
                    self.pasted.add_free(ChoiceLine(choice, seen.line.encode()), seen.count)
        return self

    def reach(self, iteration: int) -> None:
        """`iteration` iterations have ended before the next line of the stream."""
        self._settle()
        if iteration != self.iteration:
            self.iteration = iteration
            for timeline in self.timelines.values():
                timeline.change(StateChange("iteration", "", (str(iteration),), ""))

    def _read(self, text: bytes) -> None:
        """A line that was not seen before."""
        head, found, message = text.partition(grammar.INFO)
        if not head or not found:
            # Other people's text is most of some logs: what cannot be evidence ends here.
            if len(text) > LONGEST_LINE_BYTES or any(word in text for word in _NOTABLE):
                self._read_slowly(text)
            else:
                self.unread.ignored += 1
            return
        origin = self._origins[head] if head in self._origins else self._origin(head)
        if (
            origin is None
            or b" NCCL " in message
            or b"across cluster]" in message
            or not self._take(origin, message, text)
        ):
            self._read_slowly(text)

    def _take(self, origin: Origin, message: bytes, text: bytes) -> bool:
        """A whole message of one of the common forms."""
        timeline, thread = origin
        if b" Bytes -> " in message:
            # The first line with this message is the one to quote, whichever process printed it.
            line = self._choices.get(message)
            if line is None:
                choice = grammar.tuning(message)
                if choice is None:
                    return False
                line = ChoiceLine(choice, text)
            if len(text) <= _LONGEST_KNOWN_BYTES:
                if len(self._known) >= _MOST_KNOWN:
                    self._known.clear()
                    self._choices.clear()
                self._known[text] = Known(timeline, thread, line)
                self._choices[message] = line
            timeline.add_choice(thread, line)
            return True
        if b": opCount " in message:
            call = grammar.call(message)
            if call is not None:
                self._calls_seen = True
                timeline.add_call(thread, CallLine(*call, text))
                return True
        elif message.startswith(grammar.BULK_STARTS):
            timeline.lines += 1
            self.unread.ignored += 1
            return True
        return False

    def _origin(self, head: bytes) -> Origin | None:
        """Process and thread of a clean prefix, remembered by its text."""
        header = grammar.clean_header(head)
        found = None
        if header is not None:
            self.hosts.add(header.host)
            found = self._origin_of(header, header.host)
        if len(self._origins) >= _MOST_KNOWN:
            self._origins.clear()
        self._origins[head] = found
        return found

    def _origin_of(self, header: Header, host: bytes) -> Origin:
        """Process and thread of a prefix; `host` may be shorter where lines were glued."""
        key = host + b":" + header.pid
        timeline = self.timelines.get(key)
        if timeline is None:
            timeline = self.timelines[key] = Timeline(device=header.device.decode())
            if self.iteration is not None:
                timeline.change(StateChange("iteration", "", (str(self.iteration),), ""))
        thread = timeline.threads.get(header.tid)
        if thread is None:
            thread = timeline.threads[header.tid] = Thread()
        return timeline, thread

    def _read_slowly(self, text: bytes) -> None:
        """One line as it stands in the stream, with all that may have happened to it."""
        if len(text) > LONGEST_LINE_BYTES:
            self.unread.overlong += 1
            return
        for piece in grammar.plain(text).split(b"\r"):
            found = list(grammar.headers(piece)) if b" NCCL " in piece else []
            if found:
                self._read_headed(piece, found)
            else:
                self._read_bare(piece)

    def _read_headed(self, line: bytes, found: list[Header]) -> None:
        """Each message goes from its prefix to the next one; only the last is not cut."""
        hosts = [self._host(line, i, header) for i, header in enumerate(found)]
        starts = [
            header.start + len(header.host) - len(host or b"")
            for header, host in zip(found, hosts, strict=True)
        ]
        if grammar.is_fragment(line[: starts[0]]):
            self.unread.add_damaged(line[: starts[0]])
        for header, host, end in zip(found, hosts, [*starts[1:], len(line)], strict=True):
            text = line[header.start : end]
            if host is None:
                self.unread.add_damaged(text)
            else:
                origin = self._origin_of(header, host)
                self._understand(origin, line[header.message : end], text, header)

    def _host(self, line: bytes, index: int, header: Header) -> bytes | None:
        """The host of a prefix. Behind a fragment it must be one that is known from elsewhere."""
        if index == 0 and not grammar.is_fragment(line[: header.start]):
            self.hosts.add(header.host)
        if header.host in self.hosts:
            return header.host
        known = [host for host in self.hosts if header.host.endswith(host)]
        return max(known, key=len, default=None)

    def _understand(self, origin: Origin, message: bytes, text: bytes, header: Header) -> None:
        timeline, thread = origin
        message, repeated = grammar.without_repetition(message)
        timeline.deduplicated += repeated
        inner = grammar.unescaped(message)
        forms = (message,) if inner is None else (message, inner)
        for form in () if header.warning else forms:
            choice = grammar.tuning(form) if b" Bytes -> " in form else None
            call = grammar.call(form)
            if choice is not None:
                timeline.add_choice(thread, ChoiceLine(choice, text))
                return
            if call is not None:
                self._calls_seen = True
                timeline.add_call(thread, CallLine(*call, text))
                return
        timeline.lines += 1
        shown = message.decode("utf-8", "replace")
        for event in _statements(forms, text, header):
            (timeline.change if event.kind in _STATE_KINDS else timeline.describe)(event)
            return
        if _EVIDENCE.search(message) is not None:
            self.unread.add_damaged(text)
        elif grammar.is_unused(shown):
            self.unread.ignored += 1
        else:
            self.unread.add_unknown(shown)

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
                self.pasted.add_free(ChoiceLine(choice, line), 1)
            return
        self.unread.ignored += 1


def _statements(forms: tuple[bytes, ...], text: bytes, header: Header) -> Iterator[StateChange]:
    """Lines about the state of the process."""
    tables = (grammar.STATE_EVENTS, grammar.PROCESS_EVENTS, grammar.WARNINGS)
    for form in forms:
        shown = form.decode("utf-8", "replace").strip()
        for table in (tables[2], tables[1]) if header.warning else tables:
            found = grammar.find_event(shown, table)
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
    reader = StreamReader()

    def skipped() -> None:
        reader.unread.overlong += 1

    def counted() -> Iterator[bytes]:
        for block in read_blocks(source):
            reader.bytes_read += len(block)
            yield block

    position, left = 0, list(marks)
    try:
        for block in whole_lines(counted(), skipped):
            start, end = position, position + len(block)
            while left and left[0][0] < end:
                offset, iteration = left.pop(0)
                reader.feed(block[position - start : offset - start])
                reader.reach(iteration)
                position = max(position, offset)
            reader.feed(block[position - start :])
            position = end
    except StoppedError as error:
        reader.problems.append(f"{source.name}: {error}")
    return reader.finish()
