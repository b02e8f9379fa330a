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

from pydantic import AfterValidator, Field, PlainValidator, ValidationError, model_validator
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from bench.errors import UsageError
from bench.importers.quantities import units_of
from bench.spec import Frozen
from bench.workload import ImportedStep, Workload

OURS = frozenset(f.name for f in dataclasses.fields(ImportedStep)) - {"step", "extra", "lines"}
_TARGET = re.compile(r"(?P<field>\w+)(?: from (?P<unit>\S+))?|as (?P<name>.+)")


@dataclass(frozen=True)
class Target:
    """Where a number goes: a field of `ImportedStep` from a unit, or a name of its own.

    unit: "" is the field's own; "?" is known only where a unit stands behind the number.
    """

    name: str
    unit: str = ""


def _targets(value: object) -> tuple[Target, ...]:
    """`loss`, `milliseconds from s`, or `as NAME`; of several numbers a list."""
    targets = []
    for text in value if isinstance(value, list) and value else [value]:
        match = _TARGET.fullmatch(text) if isinstance(text, str) else None
        field, unit, name = match.group("field", "unit", "name") if match else (None, None, None)
        units = units_of(field or "")
        if not name and field not in OURS:
            raise ValueError(f"expected {', '.join(sorted(OURS))}, or as NAME, found {text!r}")
        if unit not in (None, "?") and unit.lower() not in units:
            raise ValueError(f"expected a unit ({', '.join(units) or 'none'}), found {text!r}")
        targets.append(Target(name or field or "", unit or ""))
    return tuple(targets)


def _fact(value: str) -> str:
    if value not in Workload.model_fields:
        raise ValueError(f"expected {', '.join(Workload.model_fields)}, found {value!r}")
    return value


Targets = Annotated[tuple[Target, ...], PlainValidator(_targets)]
Fact = Annotated[str, AfterValidator(_fact)]
"""A field of `Workload`."""
Pattern = re.Pattern[str]


class LineForm(Frozen):
    """One kind of line. Patterns are those of Python's `re`."""

    has: tuple[str, ...]
    """Words of which a line must have one, tried before the pattern."""
    match: Pattern
    """Groups: step, steps (in all), fields (a text that split and field cut), or fields' names."""
    split: Pattern | None = None
    """What parts fields; without it, field is searched for again and again."""
    field: Pattern = re.compile(r"(?P<name>[^:=]+?)\s*[:=]\s*(?P<value>.+)")
    closed: bool = False
    """Whether a separator stands behind the last field, too: one without it was cut off."""
    kind: str = "step"
    """Lines of one step that say different things; memory, argument and facts are read apart."""
    belongs: Literal["own", "next", "last"] = "own"
    """Whose step it tells of where it has no number: none, or the next or last line with one."""
    count_from: Literal[0, 1] = 1
    least: int = 0
    """Fields of ours that the line must name to be one of this kind."""

    @model_validator(mode="after")
    def _names_its_values(self) -> Self:
        pattern = self.match if self.kind == "argument" else self.field
        if lacking := {"name", "value"} - pattern.groupindex.keys():
            raise ValueError(f"expected the groups name and value, found no {min(lacking)}")
        return self


class Document(Frozen):
    """A whole text in JSON. history: a list of objects, each of the step that it has below step.

    needs: a name without which it tells of an evaluation.
    """

    history: str
    steps: str
    step: str
    needs: str


class Format(Frozen):
    """A row: one framework's lines."""

    name: str
    framework: str
    source: tuple[str, ...]
    """Where the framework prints each form."""
    lines: tuple[LineForm, ...] = ()
    fields: dict[str, Targets] = Field(default_factory=dict)
    """Name as printed: where its number goes, or its numbers in their order."""
    patterns: dict[Pattern, Targets] = Field(default_factory=dict)
    """The same, for all names that a pattern fits."""
    second: str = ""
    """What a second number is called, of which fields says nothing; it is not read without."""
    units: dict[str, str] = Field(default_factory=dict)
    """Unit as printed: the one that is meant, as GB: GiB."""
    facts: dict[Pattern, Fact] = Field(default_factory=dict)
    """Pattern of a name: what it says."""
    arguments: dict[str, Fact] = Field(default_factory=dict)
    """Name of an argument: what it says."""
    frameworks: dict[str, str] = Field(default_factory=dict)
    """Name that only one framework of several prints: that framework."""
    step: Pattern = re.compile("(?!)")
    """Pattern of the name of the field that is the step, where it is one of the fields."""
    step_from: Literal[0, 1] = 1
    kept: tuple[Pattern, ...] = ()
    """Patterns of names that are kept as they are. Others are kept too, and counted aloud."""
    unknown: str = "{name}"
    """What a field is called that no other key names."""
    generic: bool = False
    """Whether it is tried only where no framework's own row has read a line."""
    document: Document | None = None
    files: tuple[str, ...] = ()
    """What the whole files are called whose metrics it names."""


def read_format(path: Path) -> Format:
    """A row from its file.

    Raises:
        UsageError: a file that cannot be read, or that is no row.
    """
    try:
        document = YAML(typ="safe", pure=True).load(path.read_text(encoding="utf-8"))
        row = Format.model_validate(document)
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
    rows = map(read_format, sorted(Path(__file__).parent.glob("rows/*.yaml")))
    return tuple(sorted(rows, key=lambda row: row.generic))
