"""One run as its lines tell it, line by line.

A value that cannot be (a negative time, 1e308) is dropped here, with its line; a loss or gradient
norm may be NaN or infinite. A field that stands in two forms, of which one is not understood, has
no number at all.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from bench.importers.formats import OURS
from bench.importers.quantities import TABLES
from bench.workload import ImportedStep

AFTER = "memory after iterations"
"""In `extra`: the iteration behind which the memory of a step was read, where it is another one."""
MEMORY = "memory"

Value = float | str
_WHOLE = {name for name in OURS if name.endswith("_bytes")} | {"tokens"}
_MAY_DIVERGE = re.compile(r"(?i)loss|grad[_ -]?norm")
_LIMITS: dict[str, tuple[float, float]] = TABLES["limits"]
_MOST_EXTRAS = 64
_LONGEST_TEXT = 80
_SHOWN = 5
_FEW = 0.05
"""Share of a field's lines that may be damaged without making it a field of two forms."""
_NAN_ITERATIONS = "number of nan iterations"
_ODD: dict[str, str] = TABLES["odd"]


@dataclass
class Said:
    """What one line says.

    step: None for a line without a number. values: fields of `ImportedStep` by their names (in
    `ours`), and others by the source's. facts: fields of `Workload`; arguments: of the program.
    kind: lines of one step that say different things; of one kind the last counts, and of memory,
    which ranks print, the largest. belongs: of a line without a step, to which line with one.
    unread: fields whose text is not understood, and the text. empty: how many fields have none.
    unknown: names that the row does not have. is_cut_off: whether something stands behind its last
    separator; cut_off: that field.
    """

    step: int | None = None
    values: dict[str, Value] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    arguments: dict[str, str] = field(default_factory=dict)
    kind: str = "step"
    ours: set[str] = field(default_factory=set)
    empty: int = 0
    belongs: str = "own"
    unread: list[tuple[str, str]] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    is_cut_off: bool = False
    cut_off: tuple[str, str] | None = None


@dataclass
class Parsed:
    """One run as the lines that were read tell it, its name and its lines of NCCL.

    side: what the columns of a table call it, next to those of another run.
    steps: by number, what its lines say by kind. reached: by kind of line and rank, where the first
    and the last line stand.
    """

    importer: str = ""
    label: str = ""
    side: str = ""
    stated: tuple[str, ...] = ()
    workload: dict[str, Any] = field(default_factory=dict)
    arguments: dict[str, str] = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)
    nccl: list[str] = field(default_factory=list)
    first_line: int = 0
    last_line: int = 0
    _steps: dict[int, dict[str, dict[str, Value]]] = field(default_factory=dict)
    _lines: dict[int, set[int]] = field(default_factory=dict)
    _order: list[int] = field(default_factory=list)
    _memory: list[tuple[int, int, int, dict[str, Value]]] = field(default_factory=list)
    _unnumbered: list[tuple[int, dict[str, Value]]] = field(default_factory=list)
    _reached: dict[tuple[str, str], tuple[float, float]] = field(default_factory=dict)
    _dropped: list[str] = field(default_factory=list)
    _repeated: set[int] = field(default_factory=set)
    _read: Counter[str] = field(default_factory=Counter)
    _unread: Counter[str] = field(default_factory=Counter)
    _unknown: Counter[str] = field(default_factory=Counter)
    _left_out: set[str] = field(default_factory=set)

    def seen(self, line: int) -> None:
        """The run reaches to this line."""
        self.first_line = self.first_line or line
        self.last_line = line

    def begins_again(self, said: Said, rank: str) -> str:
        """What says that the line is of a later run, "" where nothing does.

        It is back at the first step of this rank or before it, or is an argument with another value
        behind steps. Lines without a step are placed by their epoch.
        """
        if self._order and any(self.arguments.get(k) != v for k, v in said.arguments.items()):
            return "other arguments stand behind steps"
        at = said.step if said.step is not None else said.values.get("epoch")
        if isinstance(at, str) or at is None or said.belongs != "own" or said.kind == MEMORY:
            return ""
        first, last = self._reached.get((said.kind, rank), (at, at))
        self._reached[said.kind, rank] = (first, at)
        return "steps begin again" if at <= first < last else ""

    def add(self, said: Said, line: int) -> None:
        """Take in what a line says."""
        self.seen(line)
        self.workload |= said.facts
        self.arguments |= said.arguments
        self._unknown.update(said.unknown)
        self._unread.update(name for name, _ in said.unread)
        place = f"line {line}" if line else f"step {said.step}"
        for name, text in (*said.unread, *filter(None, [said.cut_off])):
            self.drop(place, name, text)
        values = self._possible(said.values, place)
        if said.belongs == "last":
            kept = self._unnumbered[-1][1] if self._unnumbered else {}
            kept = self._steps[self._order[-1]]["step"] if self._order else kept
            kept |= values | kept
        elif said.step is None:
            self._unnumbered += [(line, values)] if said.values else []
        elif said.kind == MEMORY:
            self._memory.append((said.step, len(self._order), line, values))
        else:
            self._tell(said.step, said.kind, values, line)

    def drop(self, place: str, name: str, text: str) -> None:
        """Say that a value cannot be, instead of keeping it."""
        self._dropped.append(f"{name} {text[:_LONGEST_TEXT]} ({place})")

    @property
    def has_values(self) -> bool:
        """Whether any line has a number of ours."""
        return any(OURS & values.keys() for values in self._all())

    @property
    def names(self) -> list[str]:
        """Of all that was read, and what was dropped."""
        return list(dict.fromkeys(itertools.chain(*self._all(), self._unknown, self._dropped)))

    def _all(self) -> Iterator[Mapping[str, Value]]:
        yield from itertools.chain.from_iterable(step.values() for step in self._steps.values())
        yield from (values for *_, values in self._memory)
        yield from (values for _, values in self._unnumbered)

    def _tell(self, step: int, kind: str, values: dict[str, Value], line: int) -> None:
        kinds, lines = self._steps.setdefault(step, {}), self._lines.setdefault(step, set())
        if kind == "step":
            if self._order[-1:] != [step]:
                self._order.append(step)
            if len(self._unnumbered) == 1:
                # A line without a number stands above the one it belongs to.
                above, ahead = self._unnumbered.pop()
                values = ahead | values
                lines.add(above)
        if kinds.get(kind, values) != values:
            self._repeated.add(step)
        kinds[kind] = values
        lines.add(line)

    def steps(self) -> tuple[ImportedStep, ...]:
        """All of them, in the order of their numbers, and remarks on what is odd about them."""
        if not self._order and self._unnumbered:
            self.remarks.append("its lines have no step: they are numbered as they stand")
            lines, self._unnumbered = self._unnumbered, []
            for step, (line, values) in enumerate(lines, start=1):
                self._tell(step, "step", values, line)
        elif self._unnumbered:
            self.remarks.append(f"{len(self._unnumbered)} lines without a step are left out")
        self._place_memory()
        for name, count in self._unread.items():
            self._forget(name, count, self._read[name] + count)
        steps = tuple(self._step(number) for number in sorted(self._steps))
        self.remarks += self._about(steps)
        return steps

    def _forget(self, name: str, count: int, of_all: int) -> None:
        """A field of which more than a few are not understood has no number."""
        if _FEW * of_all < count < of_all:
            for kinds in self._steps.values():
                for values in kinds.values():
                    values.pop(name, None)
            self.remarks.append(
                f"{name} stands in several forms, of which {count} of {of_all} are not understood:"
                " none of its numbers is kept"
            )

    def _place_memory(self) -> None:
        """Memory belongs to the step of its number, else to the line that follows or precedes."""
        for after, position, line, said in self._memory:
            number = after
            if after not in self._steps and self._order:
                number = self._order[min(position, len(self._order) - 1)]
                said[AFTER] = float(after)
            kinds = self._steps.setdefault(number, {})
            before = kinds.setdefault(MEMORY, {})
            for name, value in said.items():
                old = before.get(name)
                larger = isinstance(value, float) and isinstance(old, float) and old > value
                before[name] = old if larger and old is not None else value
            self._lines.setdefault(number, set()).add(line)
        self._memory.clear()

    def _step(self, number: int) -> ImportedStep:
        said = {name: value for of in self._steps[number].values() for name, value in of.items()}
        known: dict[str, Any] = {
            name: round(float(said[name])) if name in _WHOLE else float(said[name])
            for name in said.keys() & OURS
        }
        extra = {name: value for name, value in said.items() if name not in OURS}
        if "loss" not in known and _number(extra.get(_NAN_ITERATIONS)) > 0:
            known["loss"] = math.nan  # Megatron-LM leaves the loss of such a step out
        lines = tuple(sorted(self._lines.get(number, set()) - {0}))
        return ImportedStep(number, **known, extra=extra, lines=lines)

    def _possible(self, values: Mapping[str, Value], place: str) -> dict[str, Value]:
        kept: dict[str, Value] = {}
        for name, value in values.items():
            own = "bytes" if name.endswith("_bytes") else name
            low, high = _LIMITS.get(own, _LIMITS["any"])
            if isinstance(value, str):
                kept[name] = value[:_LONGEST_TEXT]
            elif low <= value <= high or (not math.isfinite(value) and _MAY_DIVERGE.search(name)):
                kept[name] = value
            else:
                self.drop(place, name, f"{value:g}")
        self._read.update(kept.keys() & OURS)
        for name in [name for name in kept if name not in OURS][_MOST_EXTRAS:]:
            del kept[name]
            self._left_out.add(name)
        return kept

    def _about(self, steps: tuple[ImportedStep, ...]) -> Iterator[str]:
        if self._left_out:
            count = len(self._left_out)
            yield f"{count} columns beyond {_MOST_EXTRAS} that are not understood: left out"
        elif self._unknown:
            told = [f"{name} ({count:,})" for name, count in self._unknown.most_common()]
            yield f"fields that are not understood: {some(told)}"
        if self._dropped:
            count = len(self._dropped)
            yield f"{count} values that cannot be were dropped: {some(self._dropped)}"
        if self._repeated:
            yield (
                f"{len(self._repeated)} steps stand more than once with other numbers, as step"
                f" {min(self._repeated)}: the last line counts"
            )
        for name, words in _ODD.items():
            counts = [(step.step, int(_number(step.extra.get(name)))) for step in steps]
            odd = {step: count for step, count in counts if count > 0}
            if odd:
                where = ", ".join(map(str, [*odd][:_SHOWN]))
                yield f"{sum(odd.values())} iterations {words} (step {where})"
        timed = [
            step.step for step in steps if step.loss is not None or step.milliseconds is not None
        ]
        if {after - before for before, after in itertools.pairwise(timed)} - {1}:
            yield "not every step has a line, so that a line may be a mean over several"


def _number(value: Value | None) -> float:
    """0.0 of words and of nothing."""
    return value if isinstance(value, float) else 0.0


def some(told: Iterable[str]) -> str:
    """The first of them, and how many more there are."""
    first, more = [*told][:_SHOWN], [*told][_SHOWN:]
    return ", ".join(first) + (f" and {len(more)} more" if more else "")


def with_arguments(workload: dict[str, Any], given: dict[str, str]) -> dict[str, Any]:
    """The workload with dtypes, engine, strategy and settings, where arguments were printed."""
    if "world_size" not in given and "num_layers" not in given:
        return workload
    words = TABLES["arguments"]
    plain = {"framework": "megatron-lm"} | workload
    fsdp = given.get("use_megatron_fsdp", given.get("use_custom_fsdp")) == "True"
    dtypes = {name: given.get("megatron_fsdp_" * fsdp + name, "None") for name in words["dtypes"]}
    plain |= {
        name: words["short"].get(text, text) for name, text in dtypes.items() if text != "None"
    }
    on = {name for name, text in given.items() if text == "True"}
    plain["compute_dtype"] = "bf16" if "bf16" in on else "fp16" if "fp16" in on else "fp32"
    other = "distributed-optimizer" if "use_distributed_optimizer" in on else "ddp"
    other = "fsdp2" if "use_torch_fsdp2" in on else other
    plain["engine"] = "megatron-fsdp" if fsdp else other
    if fsdp:
        plain["strategy"] = given.get("data_parallel_sharding_strategy")
    if plain.get("tensor_parallel") != 1 or plain.get("pipeline_parallel") != 1:
        # The line counts one of several parts of the model.
        plain.pop("parameters", None)
    telling = {
        name: text
        for name, text in given.items()
        if any(kind in name for kind in words["settings"])
    }
    plain["settings"] = {name: words["constants"].get(text, text) for name, text in telling.items()}
    return plain
