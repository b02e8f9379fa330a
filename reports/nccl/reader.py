"""One stream into processes: the only place that runs once per line.

Most lines of a log repeat, so a TUNING line that was seen before is found by one look-up of the
whole line, and a COLL line by one of what stands around its counter and its buffers. Every other
line is searched for prefixes, and each message is tried form by form.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from reports.nccl import grammar
from reports.nccl.grammar import Header
from reports.nccl.inspector import InspectorTimes
from reports.nccl.model import MAX_QUOTE_CHARACTERS, Choice, StateChange, Unread
from reports.nccl.process import Fact, Line, Process, Thread
from reports.nccl.source import LONGEST_LINE_BYTES, LogSource, StoppedError, read_lines

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
_INSPECTOR: Final = (b'"coll', b'"n_ranks', b"coll_perf")
# Of the text and of the JSON form.
_RAS: Final = (b"Communicators... (", b'"communicators_count"', b'"missing_ranks_count"')

Marks = tuple[tuple[int, int], ...]
Key = bytes | tuple[bytes, bytes]
"""A TUNING line, or what stands before and behind the varying part of a COLL line."""
Known = tuple[Thread, Line]


@dataclass
class StreamReader:
    """Facts of one stream, `source`. `unread` counts what all streams hold beside them.

    processes: by name, `host:pid`. stray: lines about every process of the stream. pasted: lines
    without the prefix of a process, by device. iteration: iterations that have ended; None before
    the first boundary. hosts: names at the beginning of lines, by which glued lines are told apart.
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
    _known: dict[Key, Known] = field(default_factory=dict)
    _begun: bytes = b""
    _damaged_before: int = field(init=False)

    def __post_init__(self) -> None:
        self._damaged_before = self.unread.damaged

    def feed(self, piece: bytes) -> None:
        """Read a line with its end, or take a piece of a long one.

        NUL bytes, which a truncated or sparse file is full of, are dropped. Where a very long line
        has carriage returns (progress bars), those end its lines.
        """
        key: Key = piece
        known, varying, whole = self._known.get(piece), None, not self._begun
        if known is None and (varying := grammar.VARYING.search(piece)) is not None:
            key = (piece[: varying.start()], piece[varying.end() :])
            known = self._known.get(key)
        if known is not None and whole:
            thread, same = known
            thread.add(same, varying)
            return
        line = self._begun + piece.replace(b"\0", b"")
        self._begun = b""
        if line.endswith(b"\n"):
            known = self._read(line[:-1])
            if known is None or not whole or len(self._known) >= _MOST_KNOWN:
                return
            if isinstance(known[1].fact, Choice) == (varying is None):
                self._known[key] = known
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
        self.times.close()
        for process in (*self.processes.values(), *self.pasted.values()):
            process.close()
        self._doubt_pasted()
        return self

    def _doubt_pasted(self) -> None:
        damaged = self.unread.damaged > self._damaged_before
        for process in self.pasted.values():
            for stretch in process.stretches():
                for key, seen in list(stretch.items()):
                    choice = seen.choice
                    cut = choice is not None and choice.cut
                    odd = damaged or not choice or cut or grammar.may_be_cut(choice)
                    if (self.processes and odd) or (damaged and cut):
                        del stretch[key]
                        self._damage((seen.line or seen.call_line).encode(), seen.times)

    def reach(self, iteration: int) -> None:
        """`iteration` iterations have ended before the next line of the stream."""
        if iteration != self.iteration:
            self.iteration = iteration
            for process in (*self.processes.values(), *self.pasted.values()):
                process.change(StateChange("iteration", "", (str(iteration),), ""))

    def _damage(self, text: bytes, count: int = 1) -> None:
        self.unread.add_damaged(text, self.iteration or 0, count)

    def _read(self, text: bytes) -> Known | None:
        """One line as it stands in the stream, with all that may have happened to it.

        Returns what it is when it comes again, if it is one TUNING or COLL line and nothing else.
        """
        if len(text) > LONGEST_LINE_BYTES:
            self.unread.overlong += 1
            return None
        if any(word in text for word in _INSPECTOR) and self.times.read(text):
            return None
        self.ras |= any(word in text for word in _RAS)
        if not any(word in text for word in _NOTABLE):
            self.unread.ignored += 1
            return None
        known = None
        pieces = grammar.plain(text).split(b"\r")
        for piece in pieces:
            found = list(grammar.headers(piece)) if b" NCCL " in piece else []
            known = self._read_headed(piece, found) if found else self._read_bare(piece)
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
            self._damage(line[: starts[0]])
        known = None
        for header, host, end in zip(found, hosts, [*starts[1:], len(line)], strict=True):
            text = line[header.start : end]
            if host is None:
                self._damage(text)
            else:
                message = line[header.message : end]
                process = self._process(header, host)
                known = self._understand(process, header.tid, message, text, warning=header.warning)
        return known if whole and len(found) == 1 else None

    def _host(self, line: bytes, index: int, header: Header) -> bytes | None:
        """The host of a prefix. Behind a fragment it must be one that is known from elsewhere."""
        if index == 0 and not grammar.is_fragment(line[: header.start]):
            self.hosts.add(header.host)
        if header.host in self.hosts:
            return header.host
        known = [host for host in self.hosts if header.host.endswith(host)]
        return max(known, key=len, default=None)

    def _process(self, header: Header, host: bytes) -> Process:
        """Of a prefix; `host` may be shorter than its own where lines were glued."""
        name = (host + b":" + header.pid).decode()
        process = self.processes.get(name)
        if process is None:
            process = self.processes[name] = self._begun_now(name, header.device)
        return process

    def _begun_now(self, name: str, device: bytes) -> Process:
        process = Process(name, self.source, device.decode())
        if self.iteration is not None:
            process.change(StateChange("iteration", "", (str(self.iteration),), ""))
        return process

    def _understand(
        self,
        process: Process,
        tid: bytes,
        message: bytes,
        text: bytes,
        *,
        warning: bool,
        read: Callable[[bytes], Fact | None] = grammar.fact,
    ) -> Known | None:
        """tid: of the thread, empty where the line has no prefix. read: a TUNING or COLL line."""
        message, repeated = grammar.without_repetition(message)
        process.deduplicated += repeated
        fact = None if warning else read(message)
        if fact is not None:
            thread, line = process.thread(tid), process.line(fact, text)
            alone = isinstance(fact, Choice)
            thread.add(line, None if alone else grammar.VARYING.search(text))
            return None if repeated else (thread, line)
        process.remarks += 1
        shown = message.decode("utf-8", "replace")
        event = grammar.event(shown.strip(), warning=warning)
        if event is not None:
            said = StateChange(event[0], tid.decode(), event[1], _quoted(text))
            (process.change if said.kind in grammar.STATE_KINDS else process.describe)(said)
        elif _EVIDENCE.search(message) is not None:
            self._damage(text)
        elif grammar.is_unused(shown):
            self.unread.ignored += 1
        else:
            self.unread.add_unknown(shown)
        return None

    def _read_bare(self, line: bytes) -> Known | None:
        """A line without NCCL's prefix."""
        if b"NCCL version " in line:
            shown = line.decode("utf-8", "replace")
            match = _BARE_VERSION.search(shown)
            if match is not None:
                self.stray.describe(StateChange("version", "", match.groups(), _quoted(line)))
                return None
        iteration = _ITERATION.search(line)
        if iteration is not None:
            ended = int(iteration.group(1) or iteration.group(2))
            if ended <= MOST_ITERATIONS:
                self.reach(ended)
        elif _EVIDENCE.search(line) is not None:
            found = grammar.headless(line)
            if found is None:
                self._damage(line)
                return None
            process = self.pasted.get(found.device)
            if process is None:
                process = self.pasted[found.device] = self._begun_now("", found.device)
            read = partial(grammar.pasted, marked=found.marked)
            return self._understand(
                process, b"", found.message, line, warning=found.warning, read=read
            )
        self.unread.ignored += 1
        return None


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
            reader.bytes_read += len(piece)
    except StoppedError as error:
        reader.problems.append(f"{source.name}: {error}")
    return reader.finish()
