"""`show` and `logs`: one run."""

from __future__ import annotations

import shlex
from datetime import datetime
from pathlib import Path
from typing import Any

from bench.cli import console
from bench.cli.answer import Answer
from bench.cli.duration import duration
from bench.cli.options import DEFAULT_RESULTS
from bench.cli.validating import of_validation
from bench.cli.verbs.read import LogsRequest, ShowRequest
from bench.derive.metrics import MEMORY, METRICS
from bench.derive.summary import summarise
from bench.errors import UsageError
from bench.record import RunRecord, RunStatus
from bench.store import ResultsStore
from bench.store.validations import PREFIX as VALIDATION
from reports.renderers import quantity
from sweeps.plan import Plan
from sweeps.settings import shown_value


def show_run(asked: ShowRequest) -> Answer:
    """One run, or a validation by its id."""
    store = ResultsStore.open(asked.results, create=False)
    if asked.run.startswith(VALIDATION):
        return of_validation(store.validations.read(asked.run))
    record = store.read(asked.run)
    folder = store.find(record.run_id)[1]
    again = rerun_command(store, record, asked.results)
    return Answer(
        lambda: _document(record) | {"folder": str(folder), "rerun": again},
        lambda: _text(record, folder, again),
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


def _document(record: RunRecord) -> dict[str, Any]:
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


def _text(record: RunRecord, folder: Path, again: str | None) -> str:
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


def show_logs(asked: LogsRequest) -> Answer:
    """The logs of one run, each below its name.

    Raises:
        UsageError: the run, or the rank's log, does not exist.
    """
    rank = asked.rank
    run_id, folder = ResultsStore.open(asked.results, create=False).find(asked.run)
    files = sorted((folder / "logs").glob("*.log"))
    if rank is not None:
        files = [file for file in files if file.name == f"rank{rank}.log"]
        if not files:
            raise UsageError(f"{run_id} has no log of rank {rank}")
    texts = {file.name: file.read_text(encoding="utf-8", errors="replace") for file in files}
    shown = [
        (f"==> {name} <==\n" if rank is None else "") + text.rstrip("\n")
        for name, text in texts.items()
    ]
    return Answer(
        lambda: {"run_id": run_id, "logs": texts},
        lambda: "\n".join(shown),
        remarks=() if texts else (f"{run_id} has no logs",),
        as_it_is=True,
    )
