"""Tables pasted as Markdown, TSV or CSV: a row per step, or a row per run where no step is named.

Columns are known by their names and units, whoever wrote them; the others are kept by their name.
"""

from __future__ import annotations

import csv
import dataclasses
import functools
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from bench.importers.parsed import NUMBER, Said, Value, value
from bench.workload import ImportedStep

_OURS = {one.name for one in dataclasses.fields(ImportedStep)} - {"extra", "lines"}
_RULE = re.compile(r"^\s*\|?(?:\s*:?-{2,}:?\s*\|)+(?:\s*:?-{2,}:?\s*)?$|^\s*:?-{2,}:?\s*\|.*-\s*$")
_STEP = re.compile(r"(global )?(step|iteration|iter)s?")
_DECORATION = re.compile(r"\[\^\w+\]|[*`~]|^\s*≈")
_NOTHING = ("", "-", "--", "n/a", "none")
_MOST = 2.0**53
_TIMES = re.compile(rf"{NUMBER}\s?[x×]", re.IGNORECASE)  # noqa: RUF001
_TWO = re.compile(rf"({NUMBER}) \(({NUMBER})\)$", re.IGNORECASE)
_UNITS = {"ms": 1.0, "milliseconds": 1.0, "s": 1e3, "sec": 1e3, "seconds": 1e3, "secs": 1e3}
_BYTES = {"bytes": 1.0, "kib": 2.0**10, "mib": 2.0**20, "gib": 2.0**30, "mb": 1e6, "gb": 1e9}
_RATE = r"(?:tokens|toks?)/s(?:ec(?:ond)?)?/(?:gpu|device)"
# Of a name in lower case with one space between words and none around a slash.
_MEASURES: tuple[tuple[re.Pattern[str], str, dict[str, float] | None], ...] = (
    (re.compile(r"(?:elapsed |train )?(?:step|iteration|iter) tim(?:e|ing)\b.*"), "milliseconds",
     _UNITS),
    (re.compile(r"elapsed time per iteration.*"), "milliseconds", _UNITS),
    (re.compile(r"(?:ms|milliseconds|s|seconds)(?:/| per )(?:step|iteration|iter)"),
     "milliseconds", _UNITS),
    (re.compile(rf"{_RATE}|tokens per second per (?:gpu|device)|tps(?:/gpu)?"),
     "tokens_per_second_per_device", None),
    (re.compile(r"(?:model )?tflops?(?:/s(?:ec)?)?(?:/| per )?(?:gpu|device).*|tflops"),
     "teraflops_per_device", None),
    (re.compile(r"throughput per gpu.*"), "teraflops_per_device", None),
    (re.compile(r"(?:lm |train(?:ing)? |final )?loss"), "loss", None),
    (re.compile(r"grad(?:ient)? ?norm"), "grad_norm", None),
    (re.compile(r"lr|learning rate"), "learning_rate", None),
    (re.compile(r"(?:max|peak)\b.*\breserved\b.*"), "device_reserved_peak_bytes", _BYTES),
    (re.compile(r"(?:max|peak)\b.*\b(?:mem(?:ory)?|alloc(?:ated)?)\b.*"), "device_peak_bytes",
     _BYTES),
)  # fmt: skip
_FACTS: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"model(?: name)?"), "model"),
    (re.compile(r"#?[- ]?(?:of )?(?:gpus|ranks)|num gpus|world size"), "ranks"),
    (re.compile(r"gbs|global batch(?: size)?"), "global_batch"),
    (re.compile(r"mbs|micro batch(?: size)?"), "micro_batch"),
    (re.compile(r"seq(?:uence)? ?len(?:gth)?"), "seq_len"),
    (re.compile(r"tp"), "tensor_parallel"),
    (re.compile(r"pp"), "pipeline_parallel"),
    (re.compile(r"ep"), "expert_parallel"),
    (re.compile(r"framework|engine|device|optimizer|strategy"), ""),
)


@dataclass(frozen=True)
class _Column:
    """field: of `ImportedStep`, or `step`; fact: of `Workload`; neither: kept by its name."""

    name: str
    field: str = ""
    factor: float = 1.0
    fact: str = ""


@dataclass(frozen=True)
class ParsedRow:
    """What a row says, and what it is called where rows are runs.

    said: None where the row is none. bad: what cannot be read of it, and what stands there.
    """

    said: Said | None
    label: str = ""
    bad: tuple[tuple[str, str], ...] = ()


class LogTable:
    """A table whose header was seen; `row` reads on until a line is none of its rows."""

    def __init__(self, header: list[str], split: Callable[[str], list[str]]) -> None:
        self._columns = _columns(header)
        self._split = split

    @property
    def is_of_steps(self) -> bool:
        """Whether its rows are steps of one run; else every row is a run."""
        return any(one.field == "step" for one in self._columns)

    @property
    def _is_known(self) -> bool:
        return any(one.field for one in self._columns)

    @classmethod
    def opening(cls, header: str, following: str) -> tuple[LogTable, bool] | None:
        """The table that begins with these two lines, and whether the second is a row already."""
        if "|" in header and _RULE.match(following):
            table = cls(_piped(header), _piped)
            return (table, False) if table._is_known else None
        for split in (_tabbed, _commas):
            cells, next_cells = split(header), split(following)
            if len(cells) < 2 or len(cells) != len(next_cells):  # noqa: PLR2004 - a table
                continue
            table = cls(cells, split)
            if table._is_known and any(
                column.field and isinstance(_plain(cell), float)
                for column, cell in zip(table._columns, next_cells, strict=True)
            ):
                return table, True
        return None

    def row(self, line: str) -> ParsedRow | None:
        """What a line of the table says; None where the table is over."""
        cells = self._split(line)
        if not line.strip():
            return None
        if len(cells) != len(self._columns):
            is_row = self._split is _piped and line.lstrip().startswith("|")
            return ParsedRow(None, bad=(("row of cells", str(len(cells))),)) if is_row else None
        read = _Cells()
        for column, cell in zip(self._columns, cells, strict=True):
            read.add(column, cell)
        if not self.is_of_steps:
            label = " ".join(read.words[:3])
            return ParsedRow(Said(0, read.values, read.facts), label, tuple(read.bad))
        step = read.step
        if isinstance(step, str) or not step.is_integer() or not 0 <= step < _MOST:
            return ParsedRow(None, bad=(*read.bad, ("step", str(step))))
        return ParsedRow(Said(int(step), read.values, read.facts), bad=tuple(read.bad))


class _Cells:
    """The cells of one row, one by one."""

    def __init__(self) -> None:
        self.step: Value = ""
        self.values: dict[str, Value] = {}
        self.facts: dict[str, Any] = {}
        self.words: list[str] = []
        self.bad: list[tuple[str, str]] = []

    def add(self, column: _Column, cell: str) -> None:
        one = _plain(cell)
        if isinstance(one, str) and one.lower() in _NOTHING:
            return
        if isinstance(one, str) and (two := _TWO.match(one)) and (column.field or column.fact):
            # `37556 (36108)`: another setting in brackets, beside the one of the row.
            self.values[f"{column.name} in brackets"] = value(two[2])
            one = value(two[1])
        if column.field == "step":
            self.step = one
        elif column.field and isinstance(one, float):
            self.values[column.field] = one * column.factor
        elif column.field or (isinstance(one, float) and column.fact and not 0 < one < _MOST):
            self.bad.append((column.name, cell))
        elif column.fact:
            self.facts[column.fact] = int(one) if isinstance(one, float) else one
        else:
            self.values[column.name] = one
        if isinstance(one, str) and not column.field and not _TIMES.fullmatch(one):
            self.words.append(one)


def _columns(header: list[str]) -> list[_Column]:
    """Of two that say the same, the first has our field; the other is kept by its name."""
    found: list[_Column] = []
    for one in map(_column, header):
        taken = one.field and any(one.field == other.field for other in found)
        found.append(_Column(one.name) if taken else one)
    return found


def _column(name: str) -> _Column:
    shown = re.sub(r"\s+", " ", _DECORATION.sub("", name)).strip() or "unnamed"
    plain = re.sub(r"\s*/\s*", "/", shown.lower().replace("_", " "))
    plain = plain.removeprefix("median ").removeprefix("mean ").removeprefix("average ")
    if shown in _OURS:
        return _Column(shown, shown)
    if _STEP.fullmatch(plain):
        return _Column(shown, "step")
    bare = re.sub(r"\s*[(\[][^)\]]*[)\]]\s*$", "", plain)
    for form, field, units in _MEASURES:
        if not (form.fullmatch(plain) or form.fullmatch(bare)):
            continue
        if units is None:
            return _Column(shown, field)
        unit = next((one for one in re.findall(r"[a-z]+", plain)[::-1] if one in units), None)
        if unit is None:
            unit = next((one for one in re.findall(r"[a-z]+", plain) if one in units), None)
        if unit is not None:
            return _Column(shown, field, units[unit])
    for form, fact in _FACTS:
        if form.fullmatch(bare):
            return _Column(shown, fact=fact or bare)
    return _Column(shown)


def _plain(cell: str) -> Value:
    text = _DECORATION.sub("", cell).strip()
    return value(text) if re.fullmatch(rf"{NUMBER}\s?%?", text, re.IGNORECASE) else text[:80]


def _piped(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().removeprefix("|").removesuffix("|").split("|")]


def _delimited(line: str, mark: str) -> list[str]:
    try:
        rows = csv.reader([line.rstrip("\r\n")], delimiter=mark)
        return [cell.strip() for cell in next(rows, [])]
    except csv.Error:
        return []


_tabbed = functools.partial(_delimited, mark="\t")
_commas = functools.partial(_delimited, mark=",")
