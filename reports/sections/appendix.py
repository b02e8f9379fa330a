"""Configuration and environment of every cell, folded away: enough to repeat each run.

What all cells share is said once; of each cell only what differs follows.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from reports.findings import Findings
from reports.renderers.document import Block, Details, Heading, Section
from reports.renderers.quantity import counted
from reports.views.cells import Cell, Run

# These differ between runs of one machine without changing what was measured.
_VOLATILE = ("collected_utc", "argv", "set_by_launch", "load_average_before")
# What the engine is and what meters cost belongs to the cell, not to the machine.
_OF_THE_CELL = ("meters", "start", "numa_nodes", "engine", "engine_code_path", "code_proof")


def appendix(findings: Findings) -> Section:
    """The shared configuration, each cell's own; the shared environment, and who differs."""
    blocks: list[Block] = [Heading("Configuration")]
    blocks.extend(_configurations(findings.cells))
    runs = [(cell, run) for cell in findings.cells for run in cell.runs]
    if runs:
        blocks.append(Heading("Environment"))
        blocks.extend(_environments(runs))
    return Section("appendix", "Appendix", tuple(blocks))


def _configurations(cells: Sequence[Cell]) -> list[Details]:
    resolved = [cell.resolved.model_dump(mode="json") for cell in cells]
    if len(cells) <= 1:
        return [
            Details(cell.name, _json({"resolved": whole, **_history(cell)}))
            for cell, whole in zip(cells, resolved, strict=True)
        ]
    shared, own = shared_and_own(resolved)
    details = [Details("Shared by all cells", _json(shared))]
    for cell, different in zip(cells, own, strict=True):
        details.append(Details(cell.name, _json({"differs_in": different, **_history(cell)})))
    return details


def _history(cell: Cell) -> dict[str, Any]:
    """The runs behind a cell, newest code only."""
    runs = [
        {
            "run": run.record.run_id,
            "state": run.record.status.state,
            "started_utc": run.record.status.started_utc,
            "ended_utc": run.record.status.ended_utc,
            "code": run.record.status.code,
            "code_proof": run.record.status.code_proof,
            "summary_formula": run.summary.formula,
            "steady": None if run.summary.steady is None else run.summary.steady.model_dump(),
            "notes": list(run.summary.notes),
            "load_average_before": run.record.environment.get("load_average_before"),
            "launch_variables": run.record.environment.get("set_by_launch"),
        }
        for run in cell.runs
    ]
    return {"config_hash": cell.resolved.config_hash, "runs": runs}


def _environments(runs: Sequence[tuple[Cell, Run]]) -> list[Details]:
    shared, own = shared_and_own([_environment(run) for _, run in runs])
    details = [Details("Environment of every cell", _json(shared))]
    cells_by_difference: dict[str, dict[str, None]] = {}
    for (cell, _), different in zip(runs, own, strict=True):
        if different:
            cells_by_difference.setdefault(_json(different), {})[cell.name] = None
    for text, names in cells_by_difference.items():
        who = f"{counted(len(names), 'cell')}: {', '.join(names)}"
        details.append(Details(f"Only in the environment of {who}", text))
    return details


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
    keys = dict.fromkeys(key for document in documents for key in document)
    for key in keys:
        values = [document.get(key, _ABSENT) for document in documents]
        if all(isinstance(value, Mapping) and value for value in values):
            inner, rests = shared_and_own(values)
            if inner:
                shared[key] = inner
            for rest, mine in zip(rests, own, strict=True):
                if rest:
                    mine[key] = rest
        elif all(value == values[0] and type(value) is type(values[0]) for value in values):
            shared[key] = values[0]
        else:
            for value, mine in zip(values, own, strict=True):
                if value is not _ABSENT:
                    mine[key] = value
    return shared, own
