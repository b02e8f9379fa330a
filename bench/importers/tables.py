"""Tables pasted as Markdown, TSV, CSV or columns: a row per step, or a row or column per run."""

from __future__ import annotations

import csv
import functools
import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from bench.importers.labels import wordings
from bench.importers.parsed import Parsed, Said
from bench.importers.quantities import NOTHING, NUMBER, TABLES, quantities
from bench.importers.reading import MOST, FormatReader, step_in

_RULE = re.compile(r"^\s*\|?(?:\s*:?-+:?\s*\|)+(?:\s*:?-+:?\s*)?$")
_FOOTNOTE = re.compile(r"\[\^\w+\]\s*$")
_DECORATION = re.compile(r"\[\^\w+\]|[*`~]|</?\w+>")
_TIMES = re.compile(rf"{NUMBER}\s?[x×]", re.IGNORECASE)  # noqa: RUF001
_OF_A_RUN = re.compile(r"(?P<run>.+) - (?P<metric>.+?)(?P<bound>__MIN|__MAX)?")
_SIDE = re.compile(TABLES["side"], re.IGNORECASE)
NAMES_SIDE = re.compile(rf"\s*{TABLES['side']}(?: ?\([^()]*\))?:\s*", re.IGNORECASE)
"""A line that says of which side the lines below are, as `FSDP2:` and `main (nightly):`."""
_STEP = re.compile(TABLES["step"], re.IGNORECASE)
_DECIMAL = r"\d+\.\d+(?:e[-+]?\d+)?"
_NAMELESS = re.compile(rf"\s*\d{{1,9}}\s+{_DECIMAL}(?:\s+{_DECIMAL})?\s*")
# Shares, and the numbers of rows, do not say of which run a row is.
UNNAMED = "unnamed"
"""A column without a name."""
_OF_NO_RUN = re.compile(rf".*%|{UNNAMED}$")
_BASE = re.compile(TABLES["base"], re.IGNORECASE)


@dataclass(frozen=True)
class _Column:
    """run: of which it tells, where a table has columns of several.

    is_known: whether it has a field of ours. is_left_out: a smallest or largest value.
    """

    name: str
    run: str = ""
    is_known: bool = False
    is_left_out: bool = False

    @property
    def is_step(self) -> bool:
        return _STEP.fullmatch(self.name) is not None

    @functools.cached_property
    def at_step(self) -> int | None:
        """The one step of which it tells, as `loss @100`."""
        return step_in(self.name)


class LogTable:
    """A table whose header was seen; lines are taken until one is none of its rows."""

    def __init__(
        self, reader: FormatReader, header: list[str], split: Callable[[str], list[str]]
    ) -> None:
        self._reader = reader
        self._columns = [self._column(name) for name in header]
        self._tell_sides(header)
        self._split = split
        self._rows: list[tuple[int, list[str]]] = []

    @classmethod
    def at(cls, reader: FormatReader, number: int, header: str, following: str) -> LogTable | None:
        """The table that begins with this line; the one below it is still to be taken."""
        if "|" in header and _RULE.match(following):
            return cls(reader, _piped(header), _piped)
        if _NAMELESS.fullmatch(header) and _NAMELESS.fullmatch(following):
            names = ["step", "loss", "grad_norm"][: len(header.split())]
            table = cls(reader, names, _spaced)
            table.row(number, header)
            return table
        for mark, split in (("\t", _tabbed), (",", _commas), (" ", _spaced)):
            cells, below = (split(header), split(following)) if mark in header else ([], [])
            if len(cells) < 2 or len(cells) != len(below):  # noqa: PLR2004 - a table
                continue
            if split is _spaced and not _STEP.fullmatch(cells[0]):
                continue
            table = cls(reader, cells, split)
            both = [(c, bool(quantities(b))) for c, b in zip(table._columns, below, strict=True)]
            is_known = any(column.is_known for column, _ in both) and split is not _spaced
            has_number = any(is_number for c, is_number in both if c.is_known or c.is_step)
            # Of columns of prose all must be numbers.
            if (is_known and has_number) or (both[0][0].is_step and all(n for _, n in both)):
                return table
        return None

    def takes(self, line: str) -> bool:
        """Whether the line below is of the table."""
        alike = len(self._split(line)) == len(self._columns)
        is_row = self._split is _piped and line.lstrip().startswith("|")
        return bool(line.strip()) and (alike or is_row)

    def row(self, number: int, line: str) -> None:
        """Take a line."""
        if not (self._split is _piped and _RULE.match(line)):
            cells = [_FOOTNOTE.sub("", cell).strip(" *`~≈") for cell in self._split(line)]
            self._rows.append((number, cells))

    def runs(self) -> list[Parsed]:
        """What tells of each run, those without a value too.

        Rows without a step are those of steps where no column tells them apart, else of runs.
        """
        if self._split is _piped and not any(column.is_known for column in self._columns):
            self._turn()
        summaries = self._without_summaries()
        self._tell_lengths()
        sides = list(dict.fromkeys(column.run for column in self._columns if column.run)) or [""]
        has_steps = any(column.is_step for column in self._columns)
        other = [at for at, c in enumerate(self._columns) if not (c.is_known or c.is_step or c.run)]
        labels = self._labels(other)
        names = {at: self._columns[at].name.lower() for at in other}
        of_none = {name for name in names.values() if _is_summary(name) or _OF_NO_RUN.match(name)}
        telling = [name for at, name in names.items() if at in labels or name not in of_none]
        named = sorted({c.at_step for c in self._columns if c.is_known and c.at_step is not None})
        are_steps = has_steps or not (telling or named) or "epoch" in telling
        # What is said of no step stands at the first that is named.
        steps = [None] if are_steps else named or [0]
        labels, shared = ([*labels], []) if sides != [""] else self._by_side(labels, other)
        of_base = {
            tuple(cells[at] for at in shared)
            for cells in self._whole
            if shared and _BASE.match(cells[labels[0]])
        }
        where_unsaid = "a row of a table, which does not say at which step"
        unsaid = [] if are_steps or named else [where_unsaid]
        runs: list[Parsed] = []
        latest: dict[tuple[str, str, int], Parsed] = {}
        for number, cells in self._rows:
            if len(cells) != len(self._columns):
                if runs:
                    runs[-1].drop(f"line {number}", "row of cells", str(len(cells)))
                continue
            row = list(zip(self._columns, cells, strict=True))
            called = " ".join([cells[at] for at in labels if _is_word(cells[at])][:3])
            both = (called, *(self._shared(at, cells[at]) for at in shared))
            words = " ".join(filter(None, both))
            for side, step in itertools.product(sides, steps):
                at = (step, None) if step == steps[0] else (step,)
                own = row if are_steps else [cell for cell in row if cell[0].at_step in at]
                said = self._said(own, side, step)
                key = words, side, 0 if are_steps else number
                again = latest[key].begins_again(said, "") if key in latest else ""
                if again or key not in latest:
                    of_its_own = f"{again} at line {number}: they are a run of their own"
                    label = ": ".join(filter(None, (words, side)))
                    latest[key] = Parsed(
                        self._reader.row.name,
                        label,
                        side or (called if self._has_base(labels[:1]) else ""),
                        remarks=[of_its_own] if again else [*unsaid],
                    )
                    if of_base and tuple(cells[at] for at in shared) not in of_base:
                        latest[key].remarks.append("not comparable: no row of the base is like it")
                    latest[key].begins_again(said, "")
                    runs.append(latest[key])
                latest[key].seen(number)
                if said.values or said.unread:
                    latest[key].add(said, number)
        if summaries and runs:
            runs[0].remarks.append(f"no runs, as their names say: {', '.join(summaries)}")
        return runs

    @property
    def _whole(self) -> list[list[str]]:
        """Rows that lack no cell."""
        return [cells for _, cells in self._rows if len(cells) == len(self._columns)]

    def _labels(self, other: Sequence[int]) -> list[int]:
        """Those of the other columns whose words say of which run a row is.

        Where rows have steps, only if a step stands twice, and then the fewest that make runs.
        """
        rows = self._whole
        words = [at for at in other if any(_is_word(row[at]) for row in rows)]
        steps = [row[at] for row in rows for at, c in enumerate(self._columns) if c.is_step]
        if not steps:
            return words
        repeat = [at for at in words if len({row[at] for row in rows}) < len(rows)][:6]
        for count in range(1, len(repeat) + 1) if len({*steps}) < len(steps) else ():
            for some in itertools.combinations(repeat, count):
                series: dict[tuple[str, ...], list[str]] = {}
                for row, step in zip(rows, steps, strict=False):
                    series.setdefault(tuple(row[at] for at in some), []).append(step)
                if _are_runs([*series.values()]):
                    return list(some)
        return []

    @property
    def _left(self) -> list[int]:
        """Columns in front of the first with a number of ours."""
        known = (at for at, column in enumerate(self._columns) if column.is_known)
        return [*range(next(known, len(self._columns)))]

    def _without_summaries(self) -> list[str]:
        """Leave out rows that are no runs, as of differences; their names."""
        if any(column.is_step for column in self._columns):
            return []
        named = [
            next((cells[at] for at in self._left if at < len(cells) and _is_summary(cells[at])), "")
            for _, cells in self._rows
        ]
        if all(named):  # as of a column that says of every row that it passed
            return []
        self._rows = [row for row, name in zip(self._rows, named, strict=True) if not name]
        return [*dict.fromkeys(filter(None, named))]

    def _has_base(self, some: Sequence[int]) -> bool:
        """Whether these columns call a row main or base."""
        return any(_BASE.match(cells[at]) for cells in self._whole for at in some)

    def _by_side(self, labels: list[int], other: Sequence[int]) -> tuple[list[int], list[int]]:
        """Columns that say of which side a row is, and those that are alike in rows of a pair.

        The latter vary within a side, and are two of: alike in two sides, in front, words.
        """
        side = next((at for at in labels if self._has_base([at])), None)
        if side is None:
            return labels, []
        shared: list[int] = []
        for at in other:
            of_side: dict[str, set[str]] = {}
            for cells in self._whole:
                of_side.setdefault(cells[side], set()).add(cells[at])
            stands = Counter(itertools.chain.from_iterable(of_side.values()))
            name, is_again = self._columns[at].name, max(stands.values()) > 1
            is_label = is_again + (at in self._left) + (at in labels) > 1
            is_label |= is_again and bool(self._reader.fact(name))
            if at != side and is_label and max(map(len, of_side.values())) > 1:
                shared.append(at)
        return [side, *(at for at in labels if at not in (side, *shared))], shared

    def _shared(self, at: int, cell: str) -> str:
        """What a cell says in a label: numbers with the name of their column."""
        return cell if _is_word(cell) else f"{self._columns[at].name} {cell}"

    def _said(self, row: list[tuple[_Column, str]], side: str, step: int | None) -> Said:
        """What a row says of a side. step: where it has none."""
        if at := next((cell for column, cell in row if column.is_step), ""):
            amount = quantities(at)[0].plain if quantities(at) else None
            if amount is None or not amount.is_integer() or not 0 <= amount < MOST:
                return Said(unread=[("step", at)])
            step = int(amount)
        # A quantity that does not say of which run it is, next to some that do, is of none.
        lone = [c.name for c, _ in row if side and c.is_known and not c.run]
        own = [c for c in row if c[0].run in ("", side) and not c[0].is_left_out]
        pairs = [(c.name, cell) for c, cell in own if not c.is_step and c.name not in lone]
        said = self._reader.of_pairs(pairs, step)
        said.unknown += lone
        return said

    def _column(self, name: str) -> _Column:
        shown = _shown(name)
        of = _OF_A_RUN.fullmatch(shown)
        if of is not None and self._reader.meaning(of["metric"]):
            return _Column(of["metric"], of["run"], True, of["bound"] is not None)
        return _Column(shown, is_known=bool(self._reader.meaning(shown)))

    def _tell_sides(self, header: list[str]) -> None:
        """Columns of one metric for several runs, called as sides or engines."""
        of_metric: dict[str, dict[int, str]] = {}
        for at, name in enumerate(header):
            for run, metric in _sides(_shown(name)):
                if _SIDE.fullmatch(run) and not self._columns[at].run:
                    of_metric.setdefault(metric.lower(), {}).setdefault(at, run)
        # A metric that is known goes before one of more words.
        for metric in sorted(of_metric, key=lambda name: not self._reader.meaning(name)):
            runs = {at: run for at, run in of_metric[metric].items() if not self._columns[at].run}
            if len(set(runs.values())) > 1:
                is_known = bool(self._reader.meaning(metric))
                for at, run in runs.items():
                    self._columns[at] = _Column(metric, run, is_known)

    def _tell_lengths(self) -> None:
        """A column `Steps` next to words, or whose cells are alike in several rows, is a length."""
        cells = self._whole
        has_words = any(_is_word(cell) for row in cells[:1] for cell in row)
        for at, column in enumerate(self._columns):
            alike = len(cells) > 1 and len({row[at] for row in cells}) == 1
            many = _STEP.fullmatch(column.name)
            if many and many["many"] and (alike or has_words):
                self._columns[at] = _Column("number of steps")

    def _turn(self) -> None:
        """Rows as columns, where the first cells of rows name what is measured."""
        rows = self._whole
        columns = [_Column("run"), *(self._column(cells[0]) for cells in rows)]
        if any(column.is_known for column in columns):
            names = enumerate((column.name for column in self._columns[1:]), start=1)
            turned = ([name, *(cells[at] for cells in rows)] for at, name in names)
            self._columns, self._rows = columns, [(self._rows[0][0], cells) for cells in turned]


def _are_runs(series: Sequence[Sequence[str]]) -> bool:
    """Whether each has a step once, and all begin alike, or share more than half of their steps.

    What varies along one run, as a status, has neither.
    """
    counts = Counter(step for steps in series for step in steps)
    shared = all(2 * sum(counts[step] > 1 for step in steps) > len(steps) for steps in series)
    return all(len({*steps}) == len(steps) for steps in series) and (
        shared or len({steps[0] for steps in series}) == 1
    )


def _is_summary(name: str) -> bool:
    return wordings().summaries.fullmatch(name) is not None


def _shown(name: str) -> str:
    return re.sub(r"\s+", " ", _DECORATION.sub(" ", name)).strip(" #") or UNNAMED


def _sides(name: str) -> Iterator[tuple[str, str]]:
    """(run, metric) as a column's name may have them, in brackets, in front or behind."""
    if bracketed := re.fullmatch(r"(.+?) ?\(([^()]+)\)( ?\([^()]+\))?", name):
        yield bracketed[2], bracketed[1] + (bracketed[3] or "")
        yield bracketed[1], bracketed[2]
    for gap in re.finditer(r"\s*[:/-]\s+|[ _]", name):
        head, tail = name[: gap.start()], name[gap.end() :]
        yield head, tail
        yield tail, head


def _is_word(cell: str) -> bool:
    """Whether it is no number; 8B is a model."""
    numbers = [quantity for quantity in quantities(cell) if quantity.unit != "b"]
    return not (cell.lower() in NOTHING or numbers or _TIMES.fullmatch(cell))


def _piped(line: str) -> list[str]:
    bare = line.strip().removeprefix("|").removesuffix("|")
    return [cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", bare)]


def _delimited(line: str, mark: str) -> list[str]:
    try:
        rows = csv.reader([line.rstrip("\r\n")], delimiter=mark, strict=True)
        return [cell.strip() for cell in next(rows, [])]
    except csv.Error:
        return []


def _spaced(line: str) -> list[str]:
    return line.lstrip("# ").split()


_tabbed = functools.partial(_delimited, mark="\t")
_commas = functools.partial(_delimited, mark=",")
