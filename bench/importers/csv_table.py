"""A table of steps as CSV, for every framework that has no importer of its own."""

from __future__ import annotations

import csv
import dataclasses
from collections.abc import Iterable

from bench.errors import UsageError
from bench.importers.parsed import Parsed, number
from bench.workload import ImportedStep

COLUMNS = tuple(field.name for field in dataclasses.fields(ImportedStep))
_WHOLE = frozenset(name for name in COLUMNS if name.endswith("_bytes")) | {"step", "tokens"}


def read(lines: Iterable[str]) -> Parsed:
    """Columns are named as the fields of `ImportedStep`; an empty place is absent.

    Raises:
        UsageError: a column of another name, or something that is no number.
    """
    rows = csv.DictReader(lines)
    named = rows.fieldnames or ()
    parsed = Parsed()
    if "step" not in named:
        return parsed
    unknown = [name for name in named if name not in COLUMNS]
    if unknown:
        raise UsageError(
            f"column {unknown[0]!r}: expected one of {', '.join(COLUMNS)}; rename it or drop it"
        )
    for count, row in enumerate(rows, start=2):
        values = {name: _number(count, name, row.get(name)) for name in named}
        if values["step"] is not None:
            parsed.add(ImportedStep(**values))  # type: ignore[arg-type]
    return parsed


def _number(line: int, name: str, text: str | None) -> float | int | None:
    if not text or not text.strip():
        return None
    found = number(text)
    if found is None or (name in _WHOLE and not found.is_integer()):
        kind = "a whole number" if name in _WHOLE else "a number"
        raise UsageError(f"line {line}, column {name}: expected {kind}, found {text!r}")
    return int(found) if name in _WHOLE else found
