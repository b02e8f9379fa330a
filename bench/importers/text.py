"""A text of any kind, cut into the runs that stand in it.

A label (a comment, a bullet or a heading) directly above lines of a run, or a line alone above the
fence of a code block, opens a run and names it. So do steps that begin again, and lines of another
format. Everything else in the text is ignored.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

from bench.importers import labels
from bench.importers.parsed import Parsed, Said, some, with_arguments
from bench.importers.reading import FormatReader
from bench.importers.tables import NAMES_SIDE, UNNAMED, LogTable

# Of colours, the escape in front can be lost, or be written out.
_COLOUR = re.compile(
    r"(?:\x1b|\ufffd|\u241b|\^\[|\\(?:x1b|u001b|033|e))\[[\d;?]*[A-Za-z]|\[\d{1,3}(?:;\d{1,3})*m"
)
_FENCE = re.compile(r"^\s*(?:```|~~~)")
_RANK = re.compile(
    r"(?:\[(?:rank|Rank |default|1,)|\brank-|^\s*)(?P<rank>\d{1,6})(?:\]:?|/\d+\]|: )"
)
_NCCL = re.compile(r"NCCL (?:INFO|WARN) .*(?: Bytes -> |NCCL version)")
_MOST_NCCL_LINES = 2000
_MOST_PROSE_LINES = 3
_MOST_WRAPPED = 12
_SHORT = 100
_MOST_READINGS = 4
_MOST_IDLE = 3
_NARROWEST = 40
_OPEN = re.compile(r"(?:\||\bvalidate)\s*$")
_REST = re.compile(r"\s*[\d.,]{1,12}(?:e[-+]?\d+)?%?\s*", re.IGNORECASE)
_LONGEST_LINE = 1 << 16


def runs_of(
    lines: Iterable[str], readers: Sequence[FormatReader]
) -> tuple[list[Parsed], list[str]]:
    """The runs of a text, in its order, and names of what stands in it without a value of ours.

    Args:
        lines: without their ends.
        readers: the first that understands a line has it; those with patterns read tables.
    """
    return _Cut(_Lines(enumerate(lines, start=1)), readers).finished()


class _Lines:
    """Lines without colours, each with its number; those ahead can be looked at."""

    def __init__(self, lines: Iterable[tuple[int, str]]) -> None:
        self._rest = (
            (number, _COLOUR.sub("", part))
            for number, line in lines
            for part in line.removeprefix("\ufeff").strip("\r").split("\r")
            if len(part) <= _LONGEST_LINE
        )
        self._ahead: deque[tuple[int, str]] = deque()

    def take(self) -> tuple[int, str] | None:
        return self._ahead.popleft() if self._ahead else next(self._rest, None)

    def ahead(self, count: int) -> str:
        """The line so many below the one that was taken; "" behind the end."""
        while len(self._ahead) < count and (line := next(self._rest, None)) is not None:
            self._ahead.append(line)
        return self._ahead[count - 1][1] if len(self._ahead) >= count else ""


class _Cut:
    """Line by line; `_label` is what the next lines of a run would be called.

    section: the runs below one label, by what wrote them. heading: above lines that name a side.
    """

    def __init__(self, lines: _Lines, readers: Sequence[FormatReader]) -> None:
        self._lines = lines
        self._readers = readers
        self._runs: list[Parsed] = []
        self._section: list[Parsed] = []
        self._generic = {reader.row.name for reader in readers if reader.row.generic}
        self._label: str | None = None
        self._heading = ""
        self._stated: dict[str, Any] = {}
        self._is_marked, self._prose = False, 0
        self._width = 0

    @property
    def _is_near(self) -> bool:
        return self._label is not None and self._prose <= _MOST_PROSE_LINES

    def finished(self) -> tuple[list[Parsed], list[str]]:
        self._read_all()
        without = [run for run in self._runs if not run.has_values]
        names = list(dict.fromkeys(name for run in without for name in run.names))
        names = [name for name in names if not name.startswith(UNNAMED)]
        if len(without) == len(self._runs):
            return [], names
        kept = [run for run in self._runs if run.has_values or run.nccl]
        if names:
            kept[0].remarks.append(
                f"elsewhere in the text, without a number of ours: {some(names)}"
            )
        for run in kept:
            run.workload = with_arguments(run.workload, run.arguments)
        return kept, []

    def _read_all(self) -> None:
        before = ""
        while (taken := self._lines.take()) is not None:
            number, line = taken
            said = self._said(line) or self._begun(line)
            if said is not None and (not _OPEN.search(before) or said[0].read(before + line)):
                self._take(*self._whole(line, *said), number, line)
                before = ""
                continue
            if (table := self._table_at(number, line)) is not None:
                self._read_table(table)
            elif _NCCL.search(line):
                run = self._runs[-1] if self._runs and not self._is_near else self._open()
                run.seen(number)
                if len(run.nccl) < _MOST_NCCL_LINES:
                    run.nccl.append(line.strip())
            elif line.strip() and not _FENCE.match(line):
                following = self._lines.ahead(1)
                ends = not following.strip() or _FENCE.match(following) is not None
                self._text(line, alone=ends and not before.strip())
            before = line

    def _begun(self, line: str) -> tuple[FormatReader, Said] | None:
        """What a line says that was wrapped before it could be known."""
        for reader in self._readers if len(line) >= _NARROWEST else ():
            words = (word for form in reader.row.lines for word in form.has)
            if not reader.row.generic and any(word in line for word in words):
                more = self._lines.ahead(1).strip()
                tried = (reader.read(f"{line}{gap}{more}") for gap in ("", " "))
                if more and any(said and said.step is not None for said in tried):
                    return (reader, Said(is_cut_off=True)) if self._said(more) is None else None
        return None

    def _said(self, line: str, *, wrapped: bool = False) -> tuple[FormatReader, Said] | None:
        known = {run.importer for run in self._section} - {"", *self._generic}
        for reader in self._readers:
            if reader.row.generic and (wrapped or (known and not self._is_near)):
                continue
            if (said := reader.read(line)) is not None:
                return reader, said
        return None

    def _whole(self, line: str, reader: FormatReader, said: Said) -> tuple[FormatReader, Said]:
        """What a line says together with the lines into which it was wrapped."""
        readings, best, latest, taken, above = [line], said, said, 0, line
        for count in range(1, _MOST_WRAPPED + 1):
            more = self._lines.ahead(count)
            is_full, has_names = self._is_full(above), bool(reader.known.search(more))
            if not (taken or latest.is_cut_off or is_full or has_names):
                break
            if not more.strip() or _FENCE.match(more) or NAMES_SIDE.fullmatch(more):
                break
            if self._said(more, wrapped=not reader.row.generic):
                break
            joined = [f"{reading}{gap}{more.strip()}" for reading in readings for gap in ("", " ")]
            tried = [(text, reader.read(text)) for text in joined if len(text) < _LONGEST_LINE]
            both = [(text, reading) for text, reading in tried if reading is not None]
            if not both:
                break
            both.sort(key=lambda pair: _quality(pair[1]), reverse=True)
            readings, latest = [text for text, _ in both[:_MOST_READINGS]], both[0][1]
            if (_quality(latest), is_full) > (_quality(best), False):
                best, taken = latest, count
                self._width = max(self._width, len(above)) if is_full else self._width
            elif count - taken > (_MOST_IDLE if best.is_cut_off or has_names else 0):
                break
            above = more
        is_open = best.values and not line.rstrip().endswith("|")
        if not taken and is_open and _REST.fullmatch(self._lines.ahead(1)):
            name, value = best.values.popitem()
            best.unread.append((name, f"{value}, which may go on below"))
        for _ in range(taken):
            self._lines.take()
        return reader, best

    def _is_full(self, line: str) -> bool:
        """Whether a line has the width of a terminal: none near it is longer, another as long."""
        width = len(line)
        below = [len(self._lines.ahead(count)) for count in range(1, _MOST_WRAPPED + 1)]
        others = [*below, self._width]
        return (
            width >= _NARROWEST
            and width == max(others)
            and (below.count(width) > (len(self._lines.ahead(1)) == width) or self._width == width)
        )

    def _text(self, line: str, *, alone: bool) -> None:
        if NAMES_SIDE.fullmatch(line):
            side = line.strip(" \t:")
            self._label = f"{self._heading}: {side}" if self._heading else side
            self._is_marked, self._stated, self._prose = False, {}, 0
            return
        marked = labels.label_of(line)
        stated = labels.facts_of(line) if alone and not marked and len(line) < _SHORT else {}
        if marked or stated:
            heading = marked or line.strip()
            self._heading = "" if NAMES_SIDE.fullmatch(f"{heading}:") else heading
        plain = labels.label_of(line, alone=alone) or (line.strip() if stated else None)
        if marked or (plain and not (self._is_near and (self._is_marked or stated))):
            self._label, self._is_marked, self._stated = marked or plain, bool(marked), {}
            self._prose = 0
        else:
            self._stated |= stated
            self._prose += not stated

    def _take(self, reader: FormatReader, said: Said, number: int, line: str) -> None:
        tells = said.step is not None or bool(said.values)
        if not self._section or (self._is_near and tells):
            self._open()
        if tells:
            self._label, self._prose = None, 0
        name = reader.row.name
        mine = [run for run in self._section if run.importer in ("", name)]
        other = "lines of another format: they are a run of their own"
        run = mine[-1] if mine else self._another(other)
        rank = match["rank"] if (match := _RANK.search(line)) else ""
        if again := run.begins_again(said, rank):
            run = self._another(f"{again} at line {number}: they are a run of their own")
            run.begins_again(said, rank)
        run.importer = name
        run.add(said, number)

    def _open(self) -> Parsed:
        run = _named(self._label or "" if self._is_near else "", self._stated)
        self._runs.append(run)
        self._section = [run]
        self._label, self._prose = None, 0
        return run

    def _another(self, remark: str) -> Parsed:
        """One more run below the label of the section."""
        run = _named(self._section[0].label, self._stated)
        run.remarks.append(remark)
        self._runs.append(run)
        self._section.append(run)
        return run

    def _table_at(self, number: int, line: str) -> LogTable | None:
        below = self._lines.ahead(1)
        readers = (reader for reader in self._readers if reader.row.patterns)
        return next(filter(None, (LogTable.at(r, number, line, below) for r in readers)), None)

    def _read_table(self, table: LogTable) -> None:
        while table.takes(self._lines.ahead(1)):
            table.row(*(self._lines.take() or (0, "")))
        heading = self._label if self._is_near else None
        for run in table.runs():
            named = _named(": ".join(filter(None, (heading, run.label))), self._stated)
            run.label, run.stated = named.label, named.stated
            run.workload = named.workload | run.workload
            self._runs.append(run)
            self._section = []
        self._label, self._prose = None, 0


def _named(label: str, stated: dict[str, Any]) -> Parsed:
    """stated: what stands between a label and its lines."""
    workload = (stated if label else {}) | labels.facts_of(label)
    return Parsed(label=label, stated=labels.stated_in(label), workload=workload)


def _quality(said: Said) -> tuple[int, bool]:
    """Of two readings the better has more fields, and fewer that are not understood."""
    worse = 2 * len(said.unread) + len(said.unknown)
    return len(said.values) + len(said.ours) - worse, not said.is_cut_off
