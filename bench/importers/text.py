"""A text of any kind, cut into the runs that stand in it.

A label (a comment, a bullet or a heading) directly above lines of a run, or a line alone above the
fence of a code block, opens a run and names it;
everything else in the text is ignored. A log without labels is one run.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping

from bench.importers import labels, megatron, trainer
from bench.importers.parsed import Line, Parsed, Said
from bench.importers.tables import LogTable

TABLE = "table"
STATE = "trainer"
_COLOUR = re.compile(r"(?:\x1b|\ufffd)\[[\d;?]*[A-Za-z]")
_FENCE = re.compile(r"^\s*(?:```|~~~)")
_NCCL = re.compile(r"NCCL (?:INFO|WARN) .*(?: Bytes -> |NCCL version)")
_MOST_NCCL_LINES = 2000
_MOST_PROSE_LINES = 3
_LONGEST_LINE = 1 << 16
_LONGEST_STATE = 1 << 28


def runs_of(lines: Iterable[str], readers: Mapping[str, Line], *, tables: bool) -> list[Parsed]:
    """The runs of a text, in its order; those without a step are left out.

    Args:
        lines: without their ends.
        readers: dialect -> what reads a line of it; the first that understands a line has it.
        tables: whether tables are looked for.
    """
    stream = iter(lines)
    first = next((line for line in stream if line.strip()), None)
    if first is None:
        return []
    first = first.removeprefix("\ufeff")
    if STATE in readers and first.lstrip().startswith("{"):
        text = _joined(first, stream)
        whole = trainer.state(text)
        if whole is not None:
            return [whole] if whole.has_steps else []
        stream = iter(text.split("\n"))
        first = next(stream)
    cut = _Cut(readers, tables=tables)
    cut.read(first)
    for line in stream:
        cut.read(line)
    cut.read("")
    return cut.finished()


def _joined(first: str, rest: Iterator[str]) -> str:
    parts, length = [first], len(first)
    for line in rest:
        length += len(line)
        parts.append(line)
        if length > _LONGEST_STATE:
            break
    return "\n".join(parts)


class _Cut:
    """Line by line; `_label` is what the next lines of a run would be called."""

    def __init__(self, readers: Mapping[str, Line], *, tables: bool) -> None:
        self._readers = readers
        self._tables = tables
        self._runs: list[Parsed] = []
        self._label: str | None = None
        self._prose = 0
        self._number = 0
        self._table: LogTable | None = None
        self._heading = ""
        self._before = ""
        self._held: tuple[str, bool] | None = None

    def finished(self) -> list[Parsed]:
        for run in self._runs:
            run.workload = megatron.finish(run.workload)
        if not any(run.has_steps for run in self._runs):
            return []
        return [run for run in self._runs if run.has_steps or run.nccl]

    def read(self, raw: str) -> None:
        self._number += 1
        for piece in _COLOUR.sub("", raw[:_LONGEST_LINE]).strip("\r").split("\r"):
            self._read(piece)

    def _read(self, line: str) -> None:
        held, self._held = self._held, None
        if held is not None and self._tables and self._opens_table(held[0], line):
            return
        if held is not None:
            ends = not line.strip() or _FENCE.match(line) is not None
            self._text(*held, followed_by_end=ends)
        if self._table is not None:
            if self._row(line):
                return
            self._table = None
        found = self._said(line)
        if found is not None:
            self._run(found[0], found[1]).add(found[1], self._number)
        elif _NCCL.search(line):
            run = self._run("", Said(0))
            run.seen(self._number)
            if len(run.nccl) < _MOST_NCCL_LINES:
                run.nccl.append(line.strip())
        else:
            # Whether it is a header or a heading, the next line tells.
            self._held = (line, not self._before.strip())
        self._before = line

    def _said(self, line: str) -> tuple[str, Said] | None:
        for name, read in self._readers.items():
            said = read(line)
            if said is not None:
                return name, said
        return None

    def _text(self, line: str, after_blank: bool, *, followed_by_end: bool) -> None:
        if not line.strip() or _FENCE.match(line):
            return
        label = labels.label_of(line, alone=after_blank and followed_by_end)
        if label is not None:
            self._label, self._prose = label, 0
        else:
            self._prose += 1

    def _run(self, importer: str, said: Said) -> Parsed:
        """The run that a line belongs to: a new one where a label stands above."""
        near = self._prose <= _MOST_PROSE_LINES
        if not self._runs or (self._label is not None and near and said.step is not None):
            self._open(self._label if near else None)
        elif said.values and self._label is not None and near:
            self._open(self._label)
        if said.step is not None or said.values:
            self._label, self._prose = None, 0
        run = self._runs[-1]
        run.importer = run.importer or importer
        return run

    def _open(self, label: str | None) -> Parsed:
        run = Parsed()
        if label is not None:
            run.label = label
            run.stated = labels.stated_in(label)
            run.workload = labels.facts_of(label)
        self._runs.append(run)
        self._label, self._prose = None, 0
        return run

    def _opens_table(self, header: str, line: str) -> bool:
        opened = LogTable.opening(header, line)
        if opened is None:
            return False
        self._table, is_row = opened
        self._heading = self._label or ""
        if self._table.is_of_steps:
            self._open(self._label).importer = TABLE
        if is_row:
            self._row(line)
        self._before = line
        return True

    def _row(self, line: str) -> bool:
        row = None if self._table is None else self._table.row(line)
        if row is None or self._table is None:
            return False
        if not self._table.is_of_steps and row.said is not None:
            run = self._open(": ".join(filter(None, (self._heading, row.label))) or None)
            run.importer = TABLE
            run.remarks.append("a row of a table, which does not say at which step")
        for bad in row.bad if self._runs else ():
            self._runs[-1].drop(self._number, *bad)
        if row.said is not None:
            self._runs[-1].add(row.said, self._number)
        self._before = line
        return True
