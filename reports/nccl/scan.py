"""Reading lines into timelines: the only place that runs once per line.

[Note: speed] Most lines of a log repeat. A line seen before is found by one dictionary look-up, a
message seen before behind a new time stamp by two, and a COLL line, which never repeats because of
its counter, by what stands before the counter and behind the buffers. Only what is new is matched
against patterns. While a block of lines holds nothing but lines seen before and no call is open, it
is counted as a whole. Caches are bounded by clearing them, never by dropping a line.

`SlowLines` reads what needs thought: state changes, decorations, damage, other people's text.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from typing import Final

from reports.nccl import grammar
from reports.nccl.grammar import Header
from reports.nccl.model import MAX_QUOTE_CHARACTERS, Call, Event, Unread
from reports.nccl.timeline import CallLine, ChoiceLine, Thread, Timeline

LONGEST_LINE_BYTES: Final = 64 * 1024
MOST_ITERATIONS: Final = 64

# What trainers print at the end of an iteration (Megatron-LM and its kin, torchtitan).
_ITERATION: Final = re.compile(
    rb"(?<![\w.])iteration\s{1,20}(\d{1,9})\s{0,4}/\s{0,20}\d{1,12}\s{0,4}\|"
    rb"|(?<![\w.])step:\s{0,20}(\d{1,9})\s{1,20}loss:"
)
_MANUAL_REGISTRATION: Final = b"[Manual REG] Register"
_BARE_VERSION: Final = re.compile(r"NCCL version (\d+\.\d+\.\d+)(?!\d)")
_EVIDENCE: Final = re.compile(
    rb" Bytes -> |NCCL INFO|NCCL WARN|: opCount |\[Symmetric\]: |\[Copy Engine\]: |\[nranks=\d"
)
_STATE_KINDS: Final = frozenset(kind for kind, _ in grammar.STATE_EVENTS)


class SlowLines:
    """The part of a scan that reads what its caches do not know."""

    def __init__(self, scan: Scan) -> None:
        self._scan = scan

    def read(self, text: bytes) -> None:
        """One line as it stands in the stream."""
        if len(text) > LONGEST_LINE_BYTES:
            self._scan.unread.overlong += 1
            return
        line = grammar.plain(text)
        for piece in line.split(b"\r") if b"\r" in line else (line,):
            found = list(grammar.headers(piece)) if b" NCCL " in piece else []
            if found:
                self._read_headed(piece, found)
            else:
                self._read_bare(piece)

    def _read_headed(self, line: bytes, found: list[Header]) -> None:
        """Each message goes from its prefix to the next one; only the last is not cut."""
        hosts = [self._host(line, i, header) for i, header in enumerate(found)]
        before = line[: found[0].start + len(found[0].host) - len(hosts[0] or b"")]
        if grammar.is_fragment(before):
            self._scan.unread.add_damaged(before)
        for index, (header, host) in enumerate(zip(found, hosts, strict=True)):
            end = len(line)
            if index + 1 < len(found):
                following = found[index + 1]
                end = following.start + len(following.host) - len(hosts[index + 1] or b"")
            message = line[header.message : end]
            if host is None:
                self._scan.unread.add_damaged(line[header.start : end])
                continue
            text = line[header.start : end]
            origin = self._scan.origin_of(header, host)
            self._understand(origin, message, text, header)

    def _host(self, line: bytes, index: int, header: Header) -> bytes | None:
        """The host of a prefix. Behind a fragment it must be one that is known from elsewhere."""
        hosts = self._scan.hosts
        if index == 0 and not grammar.is_fragment(line[: header.start]):
            hosts.add(header.host)
            return header.host
        if header.host in hosts:
            return header.host
        known = [host for host in hosts if header.host.endswith(host)]
        return max(known, key=len, default=None)

    def _understand(
        self, origin: tuple[Timeline, Thread], message: bytes, text: bytes, header: Header
    ) -> None:
        timeline = origin[0]
        message, repeated = grammar.without_repetition(message)
        timeline.deduplicated += repeated
        if not header.warning and self._evidence(origin, message, text):
            return
        self._scan.touch(timeline)
        inner = grammar.unescaped(message)
        for form in (message,) if inner is None else (message, inner):
            if self._statement(timeline, form, text, header):
                return
        shown = message.decode("utf-8", "replace")
        if _EVIDENCE.search(message) is not None:
            self._scan.unread.add_damaged(text)
        elif grammar.is_unused(shown):
            self._scan.unread.ignored += 1
        else:
            self._scan.unread.add_unknown(shown)

    def _evidence(self, origin: tuple[Timeline, Thread], message: bytes, text: bytes) -> bool:
        """A TUNING or COLL line, possibly inside a JSON string."""
        inner = grammar.unescaped(message)
        for form in (message,) if inner is None else (message, inner):
            choice = grammar.tuning(form)
            if choice is not None:
                self._scan.take_choice(origin, ChoiceLine(choice, text))
                return True
            operation, found, rest = form.partition(b": opCount ")
            if found:
                call = self._scan.call_line(operation, rest.partition(b" ")[2], text)
                if call is not None:
                    self._scan.take_call(origin, call)
                    return True
        return False

    def _statement(self, timeline: Timeline, message: bytes, text: bytes, header: Header) -> bool:
        """A line about the state of the process."""
        shown = message.decode("utf-8", "replace").strip()
        tables = (
            (grammar.WARNINGS, grammar.STANDING_EVENTS)
            if header.warning
            else (grammar.STATE_EVENTS, grammar.STANDING_EVENTS, grammar.WARNINGS)
        )
        for table in tables:
            found = grammar.find_event(shown, table)
            if found is not None:
                kind, values = found
                quote = text.decode("utf-8", "replace").strip()[:MAX_QUOTE_CHARACTERS]
                event = Event(kind, header.tid.decode(), values, quote)
                if kind in _STATE_KINDS:
                    timeline.change(event)
                else:
                    timeline.describe(event)
                return True
        return False

    def _read_bare(self, line: bytes) -> None:
        """A line without NCCL's prefix."""
        unread = self._scan.unread
        if b"NCCL version " in line:
            shown = line.decode("utf-8", "replace")
            match = _BARE_VERSION.search(shown)
            if match is not None:
                quote = shown.strip()[:MAX_QUOTE_CHARACTERS]
                self._scan.stray.describe(Event("version", "", match.groups(), quote))
                return
        iteration = _ITERATION.search(line)
        if iteration is not None:
            ended = int(iteration.group(1) or iteration.group(2))
            if ended <= MOST_ITERATIONS:
                self._scan.reach(ended)
        elif _MANUAL_REGISTRATION in line:
            quote = line.decode("utf-8", "replace").strip()[:MAX_QUOTE_CHARACTERS]
            self._scan.stray.describe(Event("manual_registration", "", (), quote))
        elif _EVIDENCE.search(line) is not None:
            unread.add_damaged(line)
            return
        unread.ignored += 1


_MOST_CACHED: Final = 40_000
_MOST_CACHED_MESSAGES: Final = 60_000
_LONGEST_CACHED_BYTES: Final = 600
_LONGEST_OPERATION_BYTES: Final = 48
_OP_COUNT: Final = b": opCount "
_NOTABLE: Final = (
    b"NCCL",
    b"iteration",
    b"step:",
    b"Bytes ->",
    b"opCount",
    b"Manual REG",
    b"nranks=",
    b"[Symmetric]: ",
    b"[Copy Engine]: ",
)
_COUNT: Final = b" count "

Origin = tuple[Timeline, Thread]


@dataclass(slots=True, eq=False)
class Known:
    """A TUNING line of a thread, whenever it occurs."""

    line: ChoiceLine
    thread: Thread
    timeline: Timeline


@dataclass
class Scan:
    """Facts of one stretch of one stream.

    after_cut: it begins in the middle of a stream with COLL lines. timelines: by process,
    `host:pid`. stray: lines about every process of the stream. iteration: iterations that have
    ended; None before the first boundary. hosts: names at the beginning of lines, by which glued
    lines are told apart.
    """

    after_cut: bool = False
    hosts: set[bytes] = field(default_factory=set)
    timelines: dict[bytes, Timeline] = field(default_factory=dict)
    stray: Timeline = field(default_factory=Timeline)
    iteration: int | None = None
    unread: Unread = field(default_factory=Unread)

    def __post_init__(self) -> None:
        self._lines: dict[bytes, Known] = {}
        self._heads: dict[bytes, Origin] = {}
        self._choices: dict[bytes, ChoiceLine] = {}
        self._known_calls: dict[tuple[bytes, bytes], tuple[Origin, Call]] = {}
        self._calls: dict[Call, Call] = {}
        self._pending: Counter[Known] = Counter()
        self._counting = False
        self._remembering = True
        self.calls_seen = self.after_cut
        self._slow = SlowLines(self)

    def feed(self, block: bytes) -> None:
        """Read whole lines: `block` ends at the end of a line, or the stream does."""
        lines = block.split(b"\n")
        if not lines[-1]:
            lines.pop()
        if not (self._counting and self._count(lines)):
            self._walk(lines)

    def finish(self) -> None:
        """Drop what only served reading; bursts stay open for what may follow."""
        self._drain()
        for cache in (self._lines, self._heads, self._choices, self._known_calls, self._calls):
            cache.clear()

    def _count(self, lines: list[bytes]) -> bool:
        """Count a block of known TUNING lines at once; False if it holds anything else."""
        try:
            known = list(map(self._lines.__getitem__, lines))
        except KeyError:
            return False
        self._pending.update(known)
        return True

    def _drain(self) -> None:
        """Give what was counted to its processes, before anything else happens to them."""
        for known, count in self._pending.items():
            timeline = known.timeline
            timeline.lines += count
            if self.iteration is not None and timeline.iteration != self.iteration:
                timeline.reach(self.iteration)
            timeline.add_free(known.line, count)
        self._pending.clear()

    def _walk(self, lines: list[bytes]) -> None:
        """Read line by line, in order."""
        self._drain()
        known_lines = self._lines.get
        known_calls = self._known_calls.get
        new_tuple = tuple.__new__
        new = 0
        for text in lines:
            known = known_lines(text)
            if known is None:
                new += 1
                head, _, tail = text.partition(_OP_COUNT)
                buffers, _, rest = tail.partition(_COUNT)
                found = known_calls((head, rest)) if rest else None
                if found is None:
                    self._read(text)
                    continue
                (timeline, thread), call = found
                # Past the named tuple's own constructor, which is slow.
                line = new_tuple(CallLine, (call, buffers, text))
                calls = thread.calls
                choices = thread.choices
                if (
                    len(choices) != 1
                    or len(calls) != 1
                    or thread.collecting
                    or self.iteration is not None
                ):
                    self.take_call((timeline, thread), line)
                    continue
                # Nearly always: one call, one choice, the next call. As in `take_call`.
                timeline.lines += 1
                last = calls[0]
                choice = choices.pop()
                simple = timeline.simple.get((id(last[0]), id(choice.choice)))
                if simple is None:
                    timeline.add_simple(last, choice)
                else:
                    seen = simple.seen
                    seen.count += 1
                    if not seen.more_buffers:
                        seen.add_buffers(last[1])
                calls[0] = line
                continue
            thread, timeline = known.thread, known.timeline
            timeline.lines += 1
            if self.iteration is not None and timeline.iteration != self.iteration:
                timeline.reach(self.iteration)
            if thread.calls and not thread.choices and not thread.collecting:
                thread.choices.append(known.line)
            else:
                timeline.add(thread, known.line)
        # Where lines carry time stamps, remembering whole lines costs and never pays.
        self._remembering = new * 10 <= len(lines) * 9 or len(self._lines) < _MOST_CACHED // 4
        self._counting = not self.calls_seen and new * 4 <= len(lines)

    def _read(self, text: bytes) -> None:
        """A line that was not seen before."""
        mark = text.find(grammar.INFO)
        if mark <= 0:
            # Other people's text is most of some logs: what cannot be evidence ends here.
            if any(word in text for word in _NOTABLE):
                self._slow.read(text)
            elif len(text) > LONGEST_LINE_BYTES:
                self.unread.overlong += 1
            else:
                self.unread.ignored += 1
            return
        origin = self._heads.get(text[:mark]) or self._origin(text, mark)
        if origin is None:
            self._slow.read(text)
            return
        message = text[mark + 11 :]
        line = self._choices.get(message)
        if line is not None:
            self._take(text, origin, line)
            return
        named = message.find(_OP_COUNT, 0, _LONGEST_OPERATION_BYTES)
        if named > 0:
            # The tail starts behind the counter.
            tail = message[message.find(b" ", named + len(_OP_COUNT)) + 1 :]
            if b" NCCL " not in tail and b"across cluster]" not in tail:
                call = self.call_line(message[:named], tail, text)
                if call is not None:
                    self._remember_call(text, origin, call.call)
                    self.take_call(origin, call)
                    return
        self._read_new(text, origin, message)

    def _read_new(self, text: bytes, origin: Origin, message: bytes) -> None:
        if b" NCCL " not in message:
            choice = grammar.tuning(message)
            if choice is not None and b"across cluster]" not in message:
                line = ChoiceLine(choice, text)
                if len(self._choices) >= _MOST_CACHED_MESSAGES:
                    self._choices.clear()
                self._choices[message] = line
                self._take(text, origin, line)
                return
            if message.startswith(grammar.BULK_STARTS):
                origin[0].lines += 1
                self.unread.ignored += 1
                return
        self._slow.read(text)

    def _take(self, text: bytes, origin: Origin, line: ChoiceLine) -> None:
        if self._remembering and len(text) <= _LONGEST_CACHED_BYTES:
            if len(self._lines) >= _MOST_CACHED:
                self._drain()
                self._lines.clear()
            self._lines[text] = Known(line, origin[1], origin[0])
        self.take_choice(origin, line)

    def take_choice(self, origin: Origin, line: ChoiceLine) -> None:
        """A TUNING line of a thread."""
        timeline, thread = origin
        self.touch(timeline)
        timeline.add(thread, line)

    def take_call(self, origin: Origin, line: CallLine) -> None:
        """A COLL line of a thread."""
        timeline, thread = origin
        self.calls_seen = True
        timeline.lines += 1
        if self.iteration is not None and timeline.iteration != self.iteration:
            timeline.reach(self.iteration)
        calls, choices = thread.calls, thread.choices
        if thread.collecting or len(calls) != 1 or len(choices) != 1:
            timeline.add(thread, line)
            return
        last = calls[0]
        choice = choices.pop()
        simple = timeline.simple.get((id(last[0]), id(choice.choice)))
        if simple is None:
            timeline.add_simple(last, choice)
        else:
            simple.count(last[1])
        calls[0] = line

    def reach(self, iteration: int) -> None:
        """`iteration` iterations have ended before the next line of the stream."""
        self._drain()
        self.iteration = iteration

    def touch(self, timeline: Timeline) -> None:
        """Count a line of the process, behind the iterations that have ended by now."""
        timeline.lines += 1
        if self.iteration is not None and timeline.iteration != self.iteration:
            timeline.reach(self.iteration)

    def _remember_call(self, text: bytes, origin: Origin, call: Call) -> None:
        """Know the call again by its line without the counter and the buffers."""
        head, _, tail = text.partition(_OP_COUNT)
        if len(text) <= _LONGEST_CACHED_BYTES and b" NCCL " not in tail:
            if len(self._known_calls) >= _MOST_CACHED_MESSAGES:
                self._known_calls.clear()
            self._known_calls[head, tail.partition(_COUNT)[2]] = (origin, call)

    def call_line(self, operation: bytes, tail: bytes, text: bytes) -> CallLine | None:
        """The COLL line with this tail, its call being the same object for equal calls."""
        found = grammar.call(operation, tail)
        if found is None:
            return None
        if len(self._calls) >= _MOST_CACHED_MESSAGES:
            self._calls.clear()
        call = self._calls.setdefault(found[0], found[0])
        return CallLine(
            call, b" ".join((b"0 sendbuff", found[1][0], b"recvbuff", found[1][1])), text
        )

    def _origin(self, text: bytes, mark: int) -> Origin | None:
        """Process and thread of a clean prefix that ends at `mark`, remembered by its text."""
        header = grammar.clean_header(text, mark)
        if header is None:
            return None
        self.hosts.add(header.host)
        origin = self.origin_of(header, header.host)
        if len(self._heads) >= _MOST_CACHED:
            self._heads.clear()
        self._heads[text[:mark]] = origin
        return origin

    def origin_of(self, header: grammar.Header, host: bytes) -> Origin:
        """Process and thread of a prefix; `host` may be shorter where lines were glued."""
        key = host + b":" + header.pid
        timeline = self.timelines.get(key)
        if timeline is None:
            device = header.device.decode()
            timeline = Timeline(after_cut=self.after_cut, device=device)
            self.timelines[key] = timeline
        return timeline, timeline.thread(header.tid)
