"""`status`: the sweeps of a results folder, the runs of one sweep, or one run and its logs."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from bench.cli import console
from bench.cli.chosen_sweep import pruned_text
from bench.cli.console import Answer
from bench.cli.options import DEFAULT_RESULTS, duration
from bench.cli.validating import of_validation
from bench.cli.verbs.read import StatusRequest
from bench.derive.metrics import MEMORY, METRICS
from bench.derive.summary import summarise
from bench.errors import UsageError
from bench.launch.code import code_identity
from bench.launch.inputs import code_now
from bench.plan import Plan
from bench.record import RunOutline, RunRecord, RunStatus
from bench.store import ResultsStore
from bench.store.documents import PREFIX as VALIDATION
from reports.renderers import quantity
from sweeps.blocks import planned_runs
from sweeps.resume import newest, remembered, standing_in
from sweeps.settings import shown_value


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


def show_status(request: StatusRequest) -> Answer:
    """Every sweep in a line, the runs of one, one run or what it printed, or a validation.

    Raises:
        UsageError: nothing, or more than one run, has this name.
    """
    store, name = ResultsStore.open(request.results, create=False), request.name
    if request.logs:
        if name is None:
            raise UsageError("--logs prints what the processes of one run printed: name the run")
        return _logs(*store.find(name))
    if name is None:
        return _of_sweeps(store, store.sweeps())
    if name.startswith(VALIDATION):
        return of_validation(store.validations.read(name))
    if sweeps := store.sweeps_called(name) or [name] * any(store.statuses(name)):
        return _of_sweeps(store, sweeps, name)
    return _of_run(store, *_found(store, name), request.results)


def _found(store: ResultsStore, name: str) -> tuple[str, Path]:
    """The run of this name.

    Raises:
        UsageError: no sweep has this name, and no run or several.
    """
    try:
        return store.find(name)
    except UsageError as no_run:
        if ":" in name:
            raise
        try:
            store.read_plan(name)
        except UsageError as no_sweep:
            raise UsageError(f"{no_sweep}; {no_run}") from None
        raise


def _of_sweeps(store: ResultsStore, names: Sequence[str], sweep: str | None = None) -> Answer:
    """The runs of one sweep, or a line for each sweep there is, or of the name `sweep`."""
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
        code_here = remembered(code_identity)
        codes = {(None, cell.id): code_here(cell.resolved) for cell in plan.cells}
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
                status.code == code_now(codes.get((run.arm, run.cell.id), ""), status),
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


def _of_run(store: ResultsStore, run_id: str, folder: Path, results: Path) -> Answer:
    record = store.read(run_id)
    again = rerun_command(store, record, results)
    return Answer(
        lambda: _run_document(record) | {"folder": str(folder), "rerun": again},
        lambda: _run_text(record, folder, again),
    )


def rerun_command(store: ResultsStore, record: RunRecord, results: Path) -> str | None:
    """The command that makes this run once more; None where its sweep does not plan it any more."""
    status = record.status
    if status.sweep is None or status.cell is None or status.sweep not in store.sweeps():
        return None
    try:
        plan = Plan.from_document(store.read_plan(status.sweep))
    except UsageError:
        return None
    hashes = {cell.of(status.arm).config_hash for cell in plan.cells if cell.id == status.cell}
    if record.resolved.config_hash not in hashes:
        return None
    words = ["mfsdp-bench", "run", plan.source]
    words += [f"--set={path}={shown_value(value)}" for path, value in (plan.fixed or {}).items()]
    words += [f"--only=cell={status.cell}", "--force"]
    words += [] if results == DEFAULT_RESULTS else [f"--results={results}"]
    return shlex.join(words) + (" (with its --arm options)" if plan.arms else "")


def _run_document(record: RunRecord) -> dict[str, Any]:
    return {
        "run_id": record.run_id,
        "status": record.status.model_dump(mode="json"),
        "resolved": record.resolved.model_dump(mode="json"),
        "config_hash": record.resolved.config_hash,
        "summary": summarise(record).model_dump(mode="json"),
        "steps_per_rank": {str(rank): len(steps) for rank, steps in record.steps.items()},
        "environment": record.environment,
        "memory": record.memory,
        "problems": list(record.problems),
    }


def _run_text(record: RunRecord, folder: Path, again: str | None) -> str:
    status, resolved = record.status, record.resolved
    summary = summarise(record)
    train, launch, dtypes = resolved.train, resolved.launch, resolved.dtypes
    rows: list[tuple[str, str]] = [
        ("run", record.run_id),
        ("folder", str(folder)),
        ("run it again", again or "its sweep does not plan it any more"),
        ("state", status.state + (f": {status.reason}" if status.reason else "")),
        ("sweep, cell", f"{status.sweep or '-'}, {status.cell or '-'} ({_which(status)})"),
        ("started", _started(status)),
        ("code", f"{status.code or '-'} ({_PROOFS[status.code_proof]})"),
        ("model", resolved.model_text),
        ("engine", f"{resolved.engine.name}, {resolved.strategy}"),
        (
            "dtypes",
            f"compute {dtypes.compute}, main weights {dtypes.main_params or 'none'}, gradients"
            f" {dtypes.main_grads}, gradient communication {dtypes.grad_comm},"
            f" sums over ranks {dtypes.reduce or dtypes.grad_comm}",
        ),
        (
            "batch",
            f"{train.global_batch} sequences of {train.seq_len} tokens, micro batch"
            f" {train.micro_batch}",
        ),
        (
            "ranks",
            f"{launch.ranks} on {launch.device}, "
            f"{quantity.counted(launch.threads_per_rank, 'thread')} each",
        ),
        ("steps", f"{min(map(len, record.steps.values()), default=0)} of {train.steps}"),
    ]
    if record.placement is not None:
        nodes = record.placement.ranks_by_node.items()
        shown = [f"{node}: {ranks[0]} to {ranks[-1]}" for node, ranks in nodes]
        rows.append(("ranks by node", ", ".join(shown)))
    rows += [
        (metric.title, quantity.amount(value, metric.unit))
        for metric in METRICS
        if metric is not MEMORY and (value := metric.of(record, summary)) is not None
    ]
    if summary.steady is not None:
        steady = summary.steady
        window = f"steps {steady.first} to {steady.last}" if steady.stable else "not stable"
        rows.append(("steady state", f"{window} ({steady.reason or steady.method})"))
    categories = summary.memory_by_category_bytes
    rows += [
        (f"memory: {name.replace('_', ' ')}", quantity.binary_bytes(size))
        for name, size in sorted(categories.items(), key=lambda item: -item[1])
    ]
    rows += [("not measured", note) for note in summary.notes]
    rows += [("problem", problem) for problem in record.problems]
    return console.columns(("what", "value"), rows)


def _started(status: RunStatus) -> str:
    """Start, and how long it took where both ends are known."""
    if not status.started_utc:
        return "-"
    started = datetime.fromisoformat(status.started_utc)
    shown = f"{started:%Y-%m-%d %H:%M:%S} UTC"
    if status.ended_utc is None:
        return shown
    took = (datetime.fromisoformat(status.ended_utc) - started).total_seconds()
    return f"{shown}, took {duration(took)}"


def _which(status: RunStatus) -> str:
    parts = [f"repeat {status.repeat}"]
    parts += [f"arm {status.arm}"] if status.arm else []
    parts += [f"attempt {status.attempt} at its block"] if status.attempt else []
    return ", ".join(parts)


_PROOFS = {
    "proven": "proven by every rank",
    "mismatch": "not what the ranks found",
    None: "not proven",
}


def _logs(run_id: str, folder: Path) -> Answer:
    """What the processes of a run printed, each file below its name."""
    texts = {
        file.name: file.read_text(encoding="utf-8", errors="replace")
        for file in sorted((folder / "logs").glob("*.log"))
    }
    return Answer(
        lambda: {"run_id": run_id, "logs": texts},
        lambda: "\n".join(f"==> {name} <==\n{text.rstrip()}" for name, text in texts.items()),
        remarks=() if texts else (f"{run_id} has no logs",),
        as_it_is=True,
    )
