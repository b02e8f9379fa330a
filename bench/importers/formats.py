"""Formats of logs as data: how a line of steps is recognised, and what its fields mean.

A row is a file of YAML below `rows`; a user's own has the same keys (docs/import.md).
"""

from __future__ import annotations

import dataclasses
import functools
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, ValidationError, field_validator, model_validator
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from bench.errors import UsageError
from bench.importers.quantities import units_of
from bench.spec import Frozen
from bench.workload import ImportedStep, Workload

OURS = frozenset(f.name for f in dataclasses.fields(ImportedStep)) - {"step", "extra", "lines"}
#: The kind of a line that says one argument.
ARGUMENT = "argument"
_ROWS = Path(__file__).parent / "rows"
_TARGET = re.compile(r"(?P<field>\w+)(?: from (?P<unit>\S+))?|as (?P<name>.+)")


def _compiled(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise ValueError(f"{text!r} is no pattern: {error}") from error
    return text


PatternText = Annotated[str, AfterValidator(_compiled)]
"""The text of a pattern, which a reader joins with others or compiles."""


@dataclass(frozen=True)
class Target:
    """Where a number goes: a field of `ImportedStep` from a unit, or a name of its own.

    unit: "" is the field's own; "?" is known only where a unit stands behind the number.
    """

    name: str
    unit: str = ""

    @classmethod
    def of(cls, text: str) -> Self:
        """`loss`, `milliseconds from s`, or `as NAME` for a number that is kept by that name."""
        match = _TARGET.fullmatch(text)
        if match is not None and match["name"]:
            return cls(match["name"])
        if match is None or match["field"] not in OURS:
            raise ValueError(f"expected {', '.join(sorted(OURS))}, or as NAME, found {text!r}")
        unit, known = match["unit"] or "", units_of(match["field"])
        if unit not in ("", "?") and unit.lower() not in known:
            raise ValueError(f"expected a unit ({', '.join(known) or 'none'}), found {text!r}")
        return cls(match["field"], unit)


class LineForm(Frozen):
    """One kind of line. Patterns are those of Python's `re`."""

    has: tuple[str, ...]
    """Words of which a line must have one, tried before the pattern."""
    match: re.Pattern[str]
    """Groups: step, steps (in all), fields (a text that split and field cut), or fields' names."""
    split: re.Pattern[str] | None = None
    """What parts fields; without it, field is searched for again and again."""
    field: re.Pattern[str] = re.compile(r"(?P<name>[^:=]+?)\s*[:=]\s*(?P<value>.+)")
    closed: bool = False
    """Whether a separator stands behind the last field, too: one without it was cut off."""
    kind: str = "step"
    """Lines of one step that say different things; memory, argument and facts are read apart."""
    belongs: Literal["own", "next", "last"] = "own"
    """Whose step it tells of where it has no number: none, or the next or last line with one."""
    count_from: Literal[0, 1] = 1
    least: int = 0
    """Fields of ours that the line must have to be one of this kind."""

    @model_validator(mode="after")
    def _names_its_values(self) -> Self:
        pattern = self.match if self.kind == ARGUMENT else self.field
        if lacking := {"name", "value"} - pattern.groupindex.keys():
            raise ValueError(f"expected the groups name and value, found no {min(lacking)}")
        return self


class Document(Frozen):
    """A whole text in JSON. history: a list of objects, each of the step that it has below step.

    needs: a name without which it tells of no step; aside: names that do not tell of the step.
    """

    history: str
    steps: str
    step: str
    needs: str
    aside: re.Pattern[str]


class Format(Frozen):
    """A row: one framework's lines."""

    name: str
    framework: str
    source: tuple[str, ...]
    """Where the framework prints each form."""
    lines: tuple[LineForm, ...] = ()
    fields: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    """Name as printed: where its number goes, or its numbers in their order."""
    patterns: dict[PatternText, tuple[str, ...]] = Field(default_factory=dict)
    """The same, for all names that a pattern fits."""
    second: str = ""
    """What a second number is called, of which fields says nothing; it is not read without."""
    units: dict[str, str] = Field(default_factory=dict)
    """Unit as printed: the one that is meant, as GB: GiB."""
    facts: dict[PatternText, str] = Field(default_factory=dict)
    """Pattern of a name: field of `Workload`."""
    arguments: dict[str, str] = Field(default_factory=dict)
    """Name of an argument: field of `Workload`."""
    frameworks: dict[str, str] = Field(default_factory=dict)
    """Name that only one framework of several prints: that framework."""
    step: PatternText = ""
    """Pattern of the name of the field that is the step, where it is one of the fields."""
    step_from: Literal[0, 1] = 1
    kept: tuple[PatternText, ...] = ()
    """Patterns of names that are kept as they are. Others are kept too, and counted aloud."""
    unknown: str = "{name}"
    """What a field is called that no other key names."""
    generic: bool = False
    """Whether it is tried only where no framework's own row has read a line."""
    document: Document | None = None

    @field_validator("fields", "patterns", mode="before")
    @classmethod
    def _are_targets(cls, value: object) -> object:
        if not isinstance(value, dict):
            return value
        lists = {name: [to] if isinstance(to, str) else to for name, to in value.items()}
        for name, targets in lists.items():
            if not isinstance(targets, list | tuple) or not targets:
                raise ValueError(f"expected where {name!r} goes, found {targets!r}")
            for target in targets:
                Target.of(str(target))
        return lists

    @field_validator("facts", "arguments")
    @classmethod
    def _are_of_workloads(cls, value: dict[str, str]) -> dict[str, str]:
        if wrong := value.values() - Workload.model_fields.keys():
            known = ", ".join(Workload.model_fields)
            raise ValueError(f"expected {known}, found {min(wrong)!r}")
        return value


def read_format(path: Path) -> Format:
    """A row from its file.

    Raises:
        UsageError: a file that cannot be read, or that is no row.
    """
    try:
        row = Format.model_validate(
            YAML(typ="safe", pure=True).load(path.read_text(encoding="utf-8"))
        )
        row.name.encode()
    except (OSError, UnicodeError, YAMLError, RecursionError) as error:
        raise UsageError(f"--format {path}: expected a file of YAML, found: {error}") from error
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        raise UsageError(f"--format {path}: {where}: {first['msg']}") from error
    return row


@functools.cache
def shipped() -> tuple[Format, ...]:
    """All rows that are shipped, those of one framework before the generic ones."""
    rows = map(read_format, sorted(_ROWS.glob("*.yaml")))
    return tuple(sorted(rows, key=lambda row: row.generic))
