"""Resolved configuration and environment of every cell, folded away: enough to repeat each run."""

from __future__ import annotations

import json
from typing import Any

from reports.findings import Findings
from reports.renderers.document import Block, Details, Heading, Section
from reports.renderers.quantity import counted
from reports.views.cells import Cell, Run

# These differ between runs of one machine without changing what was measured.
_VOLATILE = ("collected_utc", "argv", "set_by_launch")


def appendix(findings: Findings) -> Section:
    """Configurations per cell; environments once each, with the cells that had them."""
    blocks: list[Block] = [Heading("Configuration per cell")]
    blocks.extend(_configuration(cell) for cell in findings.cells)
    blocks.append(Heading("Environments"))
    environments: dict[str, list[str]] = {}
    for cell in findings.cells:
        for run in cell.runs:
            names = environments.setdefault(_environment(run), [])
            if cell.name not in names:
                names.append(cell.name)
    for text, names in environments.items():
        every = len(names) == len(findings.cells)
        who = "every cell" if every else f"{counted(len(names), 'cell')}: {', '.join(names)}"
        blocks.append(Details(f"Environment of {who}", text))
    return Section("appendix", "Appendix", tuple(blocks))


def _configuration(cell: Cell) -> Details:
    resolved: dict[str, Any] = cell.resolved.model_dump(mode="json")
    runs = [
        {
            "run": run.record.run_id,
            "state": run.record.status.state,
            "started_utc": run.record.status.started_utc,
            "ended_utc": run.record.status.ended_utc,
            "code": run.record.status.code,
            "summary_formula": run.summary.formula,
            "steady": None if run.summary.steady is None else run.summary.steady.model_dump(),
            "notes": list(run.summary.notes),
            "launch_variables": run.record.environment.get("set_by_launch"),
        }
        for run in cell.runs
    ]
    document = {"config_hash": cell.resolved.config_hash, "runs": runs, "resolved": resolved}
    return Details(cell.name, _json(document))


def _environment(run: Run) -> str:
    kept = {k: v for k, v in run.record.environment.items() if k not in _VOLATILE}
    runtime = kept.get("runtime")
    if isinstance(runtime, dict):
        # What the engine is and what meters cost belongs to the cell, not to the machine.
        own = ("meters", "engine", "engine_code_path")
        kept["runtime"] = {k: v for k, v in runtime.items() if k not in own}
    return _json(kept)


def _json(document: dict[str, Any]) -> str:
    return json.dumps(document, indent=2, sort_keys=False, default=str)
