"""How much of the communication of a profiled run nothing was computed beside."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from reports.findings import Findings
from reports.renderers import quantity
from reports.renderers.document import Section, TableBlock
from reports.renderers.table import Table
from reports.views.cells import Cell
from reports.views.machine import entries

_CAPTION = (
    "From rank 0's trace of three steps. Exposed: nothing was computed on the device meanwhile (on "
    "a CPU: by torch, on the thread that trains). A profiled run is slower than others."
)


def communication_section(findings: Findings) -> Section | None:
    """None where no run has a trace with communication in it."""
    rows = [row for cell in findings.finished for row in _rows(cell)]
    if not rows:
        return None
    table = Table.of("cell | operation | intervals | ms | exposed ms | exposed", rows)
    return Section("communication", "Exposed communication", (TableBlock(table, _CAPTION),))


def _rows(cell: Cell) -> list[tuple[str, ...]]:
    """Of the last run that has any."""
    for run in reversed(cell.finished):
        found = entries(run.record.runtime, "communication")
        if found:
            return [_row(cell.name, name, entries(found, name)) for name in found]
    return []


def _row(cell: str, operation: str, found: Mapping[str, Any]) -> tuple[str, ...]:
    taken, exposed = float(found["milliseconds"]), float(found["exposed_milliseconds"])
    share = f"{100 * exposed / taken:.0f} %" if taken else "none"
    times = quantity.significant(taken), quantity.significant(exposed)
    return (cell, operation, str(found["count"]), *times, share)
