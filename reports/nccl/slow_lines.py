"""Lines that need thought: state changes, decorations, damage, other people's text."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from reports.nccl import decoration, grammar
from reports.nccl.decoration import Header
from reports.nccl.model import MAX_QUOTE_CHARACTERS, Event
from reports.nccl.timeline import ChoiceLine, Thread, Timeline

if TYPE_CHECKING:
    from reports.nccl.scan import Scan

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
        line = decoration.plain(text)
        for piece in line.split(b"\r") if b"\r" in line else (line,):
            found = list(decoration.headers(piece)) if b" NCCL " in piece else []
            if found:
                self._read_headed(piece, found)
            else:
                self._read_bare(piece)

    def _read_headed(self, line: bytes, found: list[Header]) -> None:
        """Each message goes from its prefix to the next one; only the last is not cut."""
        hosts = [self._host(line, i, header) for i, header in enumerate(found)]
        before = line[: found[0].start + len(found[0].host) - len(hosts[0] or b"")]
        if decoration.is_fragment(before):
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
            place = self._scan.place_of(header, host)
            self._understand(place, message, text, header)

    def _host(self, line: bytes, index: int, header: Header) -> bytes | None:
        """The host of a prefix. Behind a fragment it must be one that is known from elsewhere."""
        hosts = self._scan.hosts
        if index == 0 and not decoration.is_fragment(line[: header.start]):
            hosts.add(header.host)
            return header.host
        if header.host in hosts:
            return header.host
        known = [host for host in hosts if header.host.endswith(host)]
        return max(known, key=len, default=None)

    def _understand(
        self, place: tuple[Timeline, Thread], message: bytes, text: bytes, header: Header
    ) -> None:
        timeline = place[0]
        message, repeated = decoration.without_repetition(message)
        timeline.deduplicated += repeated
        if not header.warning and self._evidence(place, message, text):
            return
        self._scan.touch(timeline)
        inner = decoration.unescaped(message)
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

    def _evidence(self, place: tuple[Timeline, Thread], message: bytes, text: bytes) -> bool:
        """A TUNING or COLL line, possibly inside a JSON string."""
        inner = decoration.unescaped(message)
        for form in (message,) if inner is None else (message, inner):
            choice = grammar.tuning(form)
            if choice is not None:
                self._scan.take_choice(place, ChoiceLine(choice, text))
                return True
            operation, found, rest = form.partition(b": opCount ")
            if found:
                call = self._scan.call_line(operation, rest.partition(b" ")[2], text)
                if call is not None:
                    self._scan.take_call(place, call)
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
            self._reach(int(iteration.group(1) or iteration.group(2)))
        elif _MANUAL_REGISTRATION in line:
            quote = line.decode("utf-8", "replace").strip()[:MAX_QUOTE_CHARACTERS]
            self._scan.stray.describe(Event("manual_registration", "", (), quote))
        elif _EVIDENCE.search(line) is not None:
            unread.add_damaged(line)
            return
        unread.ignored += 1

    def _reach(self, iteration: int) -> None:
        if iteration <= MOST_ITERATIONS:
            self._scan.reach(iteration)
