"""What an importer makes of a text: a run, said line by line.

A reader of a dialect turns one line into `Said`; `Parsed` puts together what the lines of one run
say. A value that cannot be (a negative time, not-a-number, 1e308) is dropped here, with its line.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from bench.workload import ImportedStep

NUMBER = r"[-+]?(?:nan|inf|\.?\d(?:[\d.,]*[\d.])?(?:e[-+]?\d+)?)"
AFTER = "memory after iterations"
"""In `extra`: the iteration behind which the memory of a step was read, where it is another one."""

Value = float | str
_FIELDS = {one.name for one in dataclasses.fields(ImportedStep)} - {"step", "extra", "lines"}
_WHOLE = {name for name in _FIELDS if name.endswith("_bytes")} | {"tokens"}
# Field: the smallest and the largest value that can be.
_TIME = (1e-6, 1e10)
_LIMITS: dict[str, tuple[float, float]] = {
    "milliseconds": _TIME,
    "loss": (-1e30, 1e30),
    "grad_norm": (0.0, 1e30),
    "learning_rate": (0.0, 1e6),
    "tokens": (1.0, 1e15),
    "tokens_per_second_per_device": (1e-6, 1e12),
    "teraflops_per_device": (0.0, 1e6),
}
_BYTES = (0.0, 2.0**50)
_ANY = (-1e30, 1e30)
_THOUSANDS = re.compile(r"[-+]?\d{1,3}(?:,\d{3})+")
_MOST_EXTRAS = 64
_LONGEST_TEXT = 80
_SHOWN = 5


@dataclass(frozen=True)
class Said:
    """What one line says.

    step: None for a line without a number. values: fields of `ImportedStep` by their names, and
    others by the source's. facts: fields of `Workload`. kind: lines of one step that say different
    things; of one kind the last counts, and of memory, which ranks print, the largest.
    """

    step: int | None = None
    values: Mapping[str, Value] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)
    kind: str = "step"


Line = Callable[[str], Said | None]
MEMORY = "memory"


@dataclass
class Parsed:
    """One run as the lines that were read tell it, its name and its lines of NCCL.

    steps: by number, what its lines say by kind.
    """

    importer: str = ""
    label: str = ""
    stated: tuple[str, ...] = ()
    workload: dict[str, Any] = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)
    nccl: list[str] = field(default_factory=list)
    first_line: int = 0
    last_line: int = 0
    _steps: dict[int, dict[str, dict[str, Value]]] = field(default_factory=dict)
    _lines: dict[int, list[int]] = field(default_factory=dict)
    _order: list[int] = field(default_factory=list)
    _memory: list[tuple[int, int, int, dict[str, Value]]] = field(default_factory=list)
    _unnumbered: list[tuple[int, Mapping[str, Value]]] = field(default_factory=list)
    _repeated: set[int] = field(default_factory=set)
    _impossible: list[tuple[int, str, str]] = field(default_factory=list)

    def seen(self, line: int) -> None:
        """The run reaches to this line."""
        self.first_line = self.first_line or line
        self.last_line = line

    def add(self, said: Said, line: int) -> None:
        """Take in what a line says."""
        self.seen(line)
        self.workload |= {name: value for name, value in said.facts.items() if value is not None}
        values = self._possible(said.values, line)
        if said.step is None:
            if said.values:
                self._unnumbered.append((line, values))
            return
        if said.kind == MEMORY:
            self._memory.append((said.step, len(self._order), line, values))
            return
        kinds = self._steps.setdefault(said.step, {})
        if said.kind == "step":
            if not self._order or self._order[-1] != said.step:
                self._order.append(said.step)
            if len(self._unnumbered) == 1:
                # A line without a number stands above the one it belongs to.
                ahead_line, ahead = self._unnumbered.pop()
                values = {**ahead, **values}
                self._lines.setdefault(said.step, []).append(ahead_line)
        if said.kind in kinds and kinds[said.kind] != values:
            self._repeated.add(said.step)
        kinds[said.kind] = dict(values)
        self._lines.setdefault(said.step, []).append(line)

    def drop(self, line: int, name: str, text: str) -> None:
        """Say that a value cannot be, instead of keeping it."""
        self._impossible.append((line, name, text[:_LONGEST_TEXT]))

    @property
    def has_steps(self) -> bool:
        """Whether any line told of a step."""
        return bool(self._steps or self._memory or self._unnumbered)

    def steps(self) -> tuple[ImportedStep, ...]:
        """All of them, in the order of their numbers, and remarks on what is odd about them."""
        if not self._order and self._unnumbered:
            for number, (line, values) in enumerate(self._unnumbered, start=1):
                self.add(Said(number, values), line)
            self.remarks.append("its lines have no step: they are numbered as they stand")
        self._unnumbered.clear()
        self._place_memory()
        found = tuple(self._step(number) for number in sorted(self._steps))
        self.remarks += self._about(found)
        return found

    def _place_memory(self) -> None:
        """Memory belongs to the step of its number, else to the line that follows or precedes."""
        for after, position, line, said in self._memory:
            number, values = after, said
            if after not in self._steps and self._order:
                number = self._order[min(position, len(self._order) - 1)]
                values = {**said, AFTER: after}
            kinds = self._steps.setdefault(number, {})
            before = kinds.get(MEMORY, {})
            largest = {
                name: max(value, before[name])
                if isinstance(value, float | int) and isinstance(before.get(name), float | int)
                else value
                for name, value in values.items()
            }
            kinds[MEMORY] = {**before, **largest}
            self._lines.setdefault(number, []).append(line)
        self._memory.clear()

    def _step(self, number: int) -> ImportedStep:
        said = {name: value for of in self._steps[number].values() for name, value in of.items()}
        known: dict[str, Any] = {
            name: round(float(said[name])) if name in _WHOLE else float(said[name])
            for name in said.keys() & _FIELDS
        }
        extra = {name: value for name, value in said.items() if name not in _FIELDS}
        lines = tuple(sorted({*self._lines.get(number, ())} - {0}))
        return ImportedStep(number, **known, extra=extra, lines=lines)

    def _possible(self, values: Mapping[str, Value], line: int) -> dict[str, Value]:
        kept: dict[str, Value] = {}
        for name, value in values.items():
            if isinstance(value, str):
                if name in _FIELDS:
                    self.drop(line, name, value)
                else:
                    kept[name] = value[:_LONGEST_TEXT]
                continue
            low, high = _BYTES if name.endswith("_bytes") else _LIMITS.get(name, _ANY)
            if low <= value <= high:
                kept[name] = value
            else:
                self.drop(line, name, f"{value:g}")
        extras = [name for name in kept if name not in _FIELDS]
        for name in extras[_MOST_EXTRAS:]:
            del kept[name]
        if len(extras) > _MOST_EXTRAS:
            self.workload.setdefault("_columns_left_out", len(extras) - _MOST_EXTRAS)
        return kept

    def _about(self, steps: tuple[ImportedStep, ...]) -> list[str]:
        found = []
        if left := self.workload.pop("_columns_left_out", None):
            found.append(f"{left} columns beyond {_MOST_EXTRAS} that are not understood: left out")
        if self._impossible:
            shown = ", ".join(
                f"{name} {text}" + (f" (line {line})" if line else "")
                for line, name, text in self._impossible[:_SHOWN]
            )
            more = len(self._impossible) - _SHOWN
            found.append(
                f"{len(self._impossible)} values that cannot be were dropped: {shown}"
                + (f" and {more} more" if more > 0 else "")
            )
        if self._repeated:
            found.append(
                f"{len(self._repeated)} steps stand more than once with other numbers, as step"
                f" {min(self._repeated)}: the last line counts"
            )
        for name, words in _ODD:
            odd = [one for one in steps if float(one.extra.get(name, 0) or 0) > 0]
            if odd:
                where = ", ".join(str(one.step) for one in odd[:_SHOWN])
                lost = sum(one.loss is None for one in odd) if "nan" in name else 0
                found.append(
                    f"{sum(int(float(one.extra[name])) for one in odd)} iterations {words} (step"
                    f" {where})" + (f"; {lost} of these steps have no loss" if lost else "")
                )
        timed = [one.step for one in steps if one.loss is not None or one.milliseconds is not None]
        gaps = {after - before for before, after in itertools.pairwise(timed)}
        if gaps and gaps != {1}:
            found.append("not every step has a line, so that a line may be a mean over several")
        return found


_ODD = (
    ("number of skipped iterations", "were skipped"),
    ("number of nan iterations", "gave not-a-number"),
)


def number(text: str) -> float | None:
    """A number as logs print it, with commas between thousands; None for `3,1`, a decimal comma."""
    whole = text.partition(".")[0]
    if "," in text and not _THOUSANDS.fullmatch(whole):
        return None
    try:
        return float(whole.replace(",", "") + text[len(whole) :])
    except ValueError:
        return None


def value(text: str) -> Value:
    """A number where it is one, with `%` behind it or not; else the text."""
    plain = text.strip().removesuffix("%").strip()
    found = number(plain) if re.fullmatch(NUMBER, plain, re.IGNORECASE) else None
    return text.strip() if found is None else found


def renamed(said: Mapping[str, Value], names: Mapping[str, tuple[str, float]]) -> dict[str, Value]:
    """`said` with our fields where `names` has them: (field, factor into its unit)."""
    found: dict[str, Value] = {}
    for name, one in said.items():
        field_name, factor = names.get(name, (name, 1.0))
        found[field_name] = one if isinstance(one, str) else one * factor
    return found
