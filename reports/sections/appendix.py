"""Configuration and environment of every cell, folded away: enough to repeat each run.

What all cells share is said once; of each cell only what differs follows.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from reports.findings import Findings
from reports.renderers.document import Block, Details, Heading
from reports.renderers.quantity import counted
from reports.views.cells import Cell, Run

# These differ between runs of one machine without changing what was measured.
_VOLATILE = ("collected_utc", "argv", "set_by_launch", "load_average_before")
# What the engine is and what meters cost belongs to the cell, not to the machine.
_OF_THE_CELL = ("meters", "start", "numa_nodes", "engine", "engine_code_path", "code_proof")
_OF_THE_STATUS = {"state", "started_utc", "ended_utc", "code", "code_proof"}


def appendix(findings: Findings) -> Iterator[Block]:
    """The shared configuration, each cell's own; the shared environment, and who differs."""
    yield Heading("Configuration")
    resolved = [cell.resolved.model_dump(mode="json") for cell in findings.cells]
    shared, own = shared_and_own(resolved) if len(resolved) > 1 else ({}, resolved)
    if len(resolved) > 1:
        yield Details("Shared by all cells", _json(shared))
    title = "differs_in" if len(resolved) > 1 else "resolved"
    for cell, different in zip(findings.cells, own, strict=True):
        yield Details(cell.name, _json({title: different, **_history(cell)}))
    runs = [(cell.name, _environment(run)) for cell in findings.cells for run in cell.runs]
    if runs:
        yield Heading("Environment")
        shared, own = shared_and_own([environment for _, environment in runs])
        yield Details("Environment of every cell", _json(shared))
        cells_by_difference: dict[str, dict[str, None]] = {}
        for (name, _), different in zip(runs, own, strict=True):
            if different:
                cells_by_difference.setdefault(_json(different), {})[name] = None
        for text, names in cells_by_difference.items():
            who = f"{counted(len(names), 'cell')}: {', '.join(names)}"
            yield Details(f"Only in the environment of {who}", text)


def _history(cell: Cell) -> dict[str, Any]:
    """The runs behind a cell, newest code only."""
    runs = [
        {
            "run": run.record.run_id,
            **run.record.status.model_dump(include=_OF_THE_STATUS),
            "summary_formula": run.summary.formula,
            "steady": None if run.summary.steady is None else run.summary.steady.model_dump(),
            "notes": list(run.summary.notes),
            "load_average_before": run.record.environment.get("load_average_before"),
            "launch_variables": run.record.environment.get("set_by_launch"),
        }
        for run in cell.runs
    ]
    return {"config_hash": cell.resolved.config_hash, "runs": runs}


def _environment(run: Run) -> dict[str, Any]:
    kept = {k: v for k, v in run.record.environment.items() if k not in _VOLATILE}
    runtime = kept.get("runtime")
    if isinstance(runtime, dict):
        kept["runtime"] = {k: v for k, v in runtime.items() if k not in _OF_THE_CELL}
    return kept


def _json(document: dict[str, Any]) -> str:
    return json.dumps(document, indent=2, sort_keys=False, default=str)


_ABSENT = object()


def shared_and_own(
    documents: Sequence[Mapping[str, Any]],
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Entries equal in all documents, and per document those that are not.

    Mappings are compared entry by entry, at every depth; lists as a whole. Putting a document's own
    entries back on top of the shared ones gives the document.
    """
    shared: dict[str, Any] = {}
    own: list[dict[str, Any]] = [{} for _ in documents]
    for key in dict.fromkeys(key for document in documents for key in document):
        values = [document.get(key, _ABSENT) for document in documents]
        rests = [{} if value is _ABSENT else {key: value} for value in values]
        if all(isinstance(value, Mapping) and value for value in values):
            inner, inner_rests = shared_and_own(values)
            shared |= {key: inner} if inner else {}
            rests = [{key: rest} if rest else {} for rest in inner_rests]
        elif all(value == values[0] and type(value) is type(values[0]) for value in values):
            shared[key] = values[0]
            continue
        for mine, rest in zip(own, rests, strict=True):
            mine.update(rest)
    return shared, own
