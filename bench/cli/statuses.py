"""`status`: what is done, failed, outdated or missing of the sweeps in a results folder."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from bench.cli import console
from bench.cli.answer import Answer
from bench.cli.chosen_sweep import pruned_text
from bench.cli.verbs.read import StatusRequest
from bench.errors import UsageError
from bench.launch.code import code_identity
from bench.record import RunOutline
from bench.store import ResultsStore
from sweeps.blocks import planned_runs
from sweeps.plan import Plan
from sweeps.resume import newest, remembered, standing_in


@dataclass(frozen=True)
class RunLine:
    """The newest record of one planned run; `missing` has none.

    `current` is False where the code has changed since: `run` will repeat it. For an arm, since the
    plan was made, as its code is looked at only when it is prepared.
    """

    cell: str
    repeat: int
    state: str
    current: bool
    run_id: str
    reason: str
    arm: str | None = None


def show_status(asked: StatusRequest) -> Answer:
    """The state of one sweep, or a line for each sweep there is, or of that name."""
    store, sweep = ResultsStore.open(asked.results, create=False), asked.sweep
    names = store.sweeps() if sweep is None else store.sweeps_called(sweep) or [sweep]
    one = sweep is not None and len(names) == 1
    plans = [_readable_plan(store, name, strict=one) for name in names]
    records, damaged = store.outlines()
    lines = {
        plan.id: _run_lines(plan, [r for r in records if r.status.sweep == plan.id])
        for plan in plans
        if plan is not None
    }
    for name, plan in zip(names, plans, strict=True):
        if plan is None:
            console.note(f"warning: the plan of {name} cannot be read; plan or run it again")
    if sweep is None:
        for line in _lost_plans(names, records):
            console.note(line)
    for run in damaged:
        console.note(f"warning: {run.run_id} cannot be read: {run.problem}")
    readable = [plan for plan in plans if plan is not None]
    return Answer(
        lambda: {
            "sweeps": [_document(plan, lines[plan.id]) for plan in readable],
            "damaged": [asdict(run) for run in damaged],
        },
        lambda: _details(readable[0], lines[readable[0].id]) if one else _overview(readable, lines),
    )


def _readable_plan(store: ResultsStore, name: str, *, strict: bool) -> Plan | None:
    try:
        return Plan.from_document(store.read_plan(name))
    except UsageError:
        if strict:
            raise
        return None


def _lost_plans(names: Sequence[str], records: Sequence[RunOutline]) -> list[str]:
    """A warning for each sweep of which there are runs and no plan."""
    runs = Counter(r.status.sweep for r in records if r.status.sweep not in {None, *names})
    return [
        f"warning: {count} run{'s' if count > 1 else ''} of sweep {name}, whose plan is lost: run"
        " the sweep again, which writes the plan anew and counts what is finished"
        for name, count in sorted(runs.items(), key=str)
    ]


def _run_lines(plan: Plan, records: Sequence[RunOutline]) -> list[RunLine]:
    past = newest(standing_in(plan, records))
    codes: dict[tuple[str | None, str], str] = {
        (arm.name, cell): code for arm in plan.arms for cell, code in arm.codes.items()
    }
    if not plan.arms:
        code_now = remembered(code_identity)
        codes = {(None, cell.id): code_now(cell.resolved) for cell in plan.cells}
    result = []
    for run in planned_runs(plan):
        record = past.get((run.cell.of(run.arm).config_hash, run.repeat, run.arm))
        if record is None:
            line = RunLine(run.cell.id, run.repeat, "missing", True, "", "", run.arm)
        else:
            status = record.status
            line = RunLine(
                run.cell.id,
                run.repeat,
                "damaged" if record.damage else status.state,
                status.code == codes.get((run.arm, run.cell.id)),
                record.run_id,
                "; ".join(record.damage) or status.reason,
                run.arm,
            )
        result.append(line)
    return result


def _overview(plans: Sequence[Plan], lines: dict[str, list[RunLine]]) -> str:
    if not plans:
        return "no sweep has been run here"
    rows = []
    for plan in plans:
        states = Counter(line.state if line.current else "outdated" for line in lines[plan.id])
        shown = ", ".join(f"{state} {count}" for state, count in sorted(states.items()))
        rows.append((plan.id, str(plan.runs), shown or "-", str(len(plan.pruned))))
    return console.columns(("sweep", "runs", "states", "pruned"), rows)


def _details(plan: Plan, lines: Sequence[RunLine]) -> str:
    rows = [
        (
            f"{line.cell} [{line.arm}]" if line.arm else line.cell,
            str(line.repeat),
            _state(line),
            line.run_id.rpartition("/")[2] or "-",
            line.reason or "-",
        )
        for line in lines
    ]
    parts = [f"{plan.id}: {plan.description}".rstrip(": ")]
    if rows:
        parts.append(console.columns(("cell", "repeat", "state", "run", "reason"), rows))
    if plan.pruned:
        parts.append(pruned_text(plan))
    return "\n\n".join(parts)


def _state(line: RunLine) -> str:
    remarks = ["code changed"] * (not line.current)
    return f"{line.state} ({', '.join(remarks)})" if remarks else line.state


def _document(plan: Plan, lines: Sequence[RunLine]) -> dict[str, Any]:
    return {
        "id": plan.id,
        "description": plan.description,
        "runs": [asdict(line) for line in lines],
        "pruned": [asdict(cell) for cell in plan.pruned],
        "duplicates": [asdict(cell) for cell in plan.duplicates],
    }
