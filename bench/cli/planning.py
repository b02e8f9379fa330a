"""`plan`: the cells of a sweep as text or JSON; `schema`: the JSON Schema of a sweep file."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from bench.cli import console
from bench.cli.chosen_sweep import ChosenSweep, choose, machine_of, pruned_text
from bench.cli.console import Answer
from bench.cli.verbs.check import SchemaRequest
from bench.cli.verbs.measure import PlanRequest
from bench.plan import Plan
from bench.resolve.presets import PRESETS
from reports.nccl.sums import gradient_sums
from sweeps.resume import named
from sweeps.schema import SweepFile


def show_plan(request: PlanRequest) -> Answer:
    """The plan, and how gradients are added up in each cell."""
    requested = choose(request.wanted, machine=machine_of(request.machine))

    def text() -> str:
        parts = [plan_text(requested.chosen)]
        parts += [arms_text(requested)] if requested.arms else []
        return "\n\n".join(parts)

    return Answer(lambda: _document(requested), text)


def _document(requested: ChosenSweep) -> dict[str, Any]:
    plan = requested.chosen
    cells = {cell.id: cell.resolved for cell in plan.cells}
    sums = {name: [asdict(one) for one in gradient_sums(run)] for name, run in cells.items()}
    return plan.to_document() | {
        "arms": [{"name": arm.name, "description": arm.described()} for arm in requested.arms],
        "gradient_sums": sums,
    }


def arms_text(requested: ChosenSweep) -> str:
    """The arms for people, and the order of their runs."""
    rows = [(arm.name, arm.described()) for arm in requested.arms]
    order = (
        "block by block, the first arm of each block drawn at random"
        if requested.chosen.interleaved
        else "all runs of the first arm, then all of the next (not interleaved)"
    )
    runs = requested.chosen.runs * len(requested.arms)
    return f"{console.columns(('arm', 'code'), rows)}\n\n{runs} runs with all arms: {order}"


def plan_text(plan: Plan) -> str:
    """The plan for people: cells, then what is pruned and why, then the totals."""
    parts = [f"{plan.id}: {plan.description}".rstrip(": ")]
    if plan.cells:
        rows = [
            (cell.id, cell.resolved.config_hash, str(cell.resolved.train.steps), str(cell.repeats))
            for cell in plan.cells
        ]
        titles = ("cell", "config", "steps", "runs")
        parts.append(console.columns(titles, rows, left=2))
    if plan.pruned:
        parts.append(pruned_text(plan))
    if sums := sums_text(plan):
        parts.append(sums)
    if plan.duplicates:
        rows_same = [(cell.id, cell.reason) for cell in plan.duplicates]
        parts.append(console.columns(("merged", "reason"), rows_same))
    parts.append(_totals(plan))
    return "\n\n".join(parts)


def sums_text(plan: Plan) -> str:
    """Every kind of reduction once, behind the cells that have it; "" where none needs a word."""
    cells: dict[str, list[str]] = {}
    for cell in plan.cells:
        for one in gradient_sums(cell.resolved):
            summed = "" if one.summed == "unknown" else f"summed {one.summed}: "
            cells.setdefault(f"{one.text}, sent as {one.sent}: {summed}{one.why}", []).append(
                cell.id
            )
    lines = [f"  {text} ({named(names)})" for text, names in cells.items()]
    return "\n".join(["gradient sums", *lines]) if lines else ""


def _totals(plan: Plan) -> str:
    return (
        f"cells {plan.size}, to run {len(plan.cells)}, pruned {len(plan.pruned)},"
        f" merged {len(plan.duplicates)}, runs {plan.runs}"
    )


def show_schema(_asked: SchemaRequest) -> Answer:
    """JSON in either form."""
    document = SweepFile.model_json_schema()
    document["$defs"]["ModelSpec"]["properties"]["preset"]["enum"] = list(PRESETS)
    document["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    return Answer(lambda: document, lambda: json.dumps(document, indent=2))
