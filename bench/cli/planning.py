"""`plan`, and the plan that `run` starts from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sweeps
from bench.cli import console, exit_codes
from bench.resolve import Machine
from sweeps.definition import load_sweep
from sweeps.plan import Plan, make_plan, sweep_cells
from sweeps.selection import parse_assignments, parse_selection


@dataclass(frozen=True)
class Request:
    """What the command line says about a sweep."""

    sweep: Path
    assignments: list[str]
    only: list[str]
    skip: list[str]
    repeat: int | None


@dataclass(frozen=True)
class RequestedPlan:
    """The plan of the whole sweep, and the part of it that was selected."""

    whole: Plan
    chosen: Plan


def requested_plan(request: Request) -> RequestedPlan:
    """Read the sweep file and plan it for this machine.

    Raises:
        UsageError: the file, an option or a cell is wrong.
    """
    definition = load_sweep(sweep_file(request.sweep))
    fixed = parse_assignments(request.assignments)
    cells = sweep_cells(definition, fixed)
    selection = parse_selection(request.only, request.skip, cells)
    whole = make_plan(definition, Machine.detect(), fixed=fixed, repeat=request.repeat)
    return RequestedPlan(whole, whole.selected(c.id for c in cells if selection.keeps(c)))


def sweep_file(named: Path) -> Path:
    """The file itself, or the definition that comes with the tool under this name."""
    if named.exists() or len(named.parts) != 1:
        return named
    shipped = Path(sweeps.__path__[0]) / f"{named.name.removesuffix('.yaml')}.yaml"
    return shipped if shipped.exists() else named


def show_plan(request: Request, *, as_json: bool) -> int:
    """Print the plan."""
    plan = requested_plan(request).chosen
    if as_json:
        console.data_json(plan.to_document())
    else:
        console.data(plan_text(plan))
    return exit_codes.OK


def plan_text(plan: Plan) -> str:
    """The plan for people: cells, then what is pruned and why, then the totals."""
    parts = [f"{plan.id}: {plan.description}".rstrip(": ")]
    if plan.cells:
        rows = [
            (cell.id, cell.resolved.config_hash, str(cell.resolved.train.steps), str(cell.repeats))
            for cell in plan.cells
        ]
        parts.append(console.columns(("cell", "config", "steps", "runs"), rows, left=2))
    if plan.pruned:
        parts.append(pruned_text(plan))
    if plan.duplicates:
        rows_same = [(cell.id, cell.reason) for cell in plan.duplicates]
        parts.append(console.columns(("merged", "reason"), rows_same))
    parts.append(_totals(plan))
    return "\n\n".join(parts)


def pruned_text(plan: Plan) -> str:
    """Every pruned cell with its rule and reason."""
    rows = [(cell.id, cell.rule, cell.reason) for cell in plan.pruned]
    return console.columns(("pruned", "rule", "reason"), rows)


def _totals(plan: Plan) -> str:
    counts: dict[str, Any] = {
        "cells": plan.size,
        "to run": len(plan.cells),
        "pruned": len(plan.pruned),
        "merged": len(plan.duplicates),
        "runs": plan.runs,
    }
    return ", ".join(f"{name} {count}" for name, count in counts.items())
