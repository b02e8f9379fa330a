"""`status`: the sweeps of a results folder, the runs of one sweep, or one run and its logs."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from bench.cli import console
from bench.cli.verb import (
    DEFAULT_RESULTS,
    Answer,
    ResultsOption,
    argument,
    columns,
    option,
    pruned_cells,
)
from bench.errors import UsageError
from reports.renderers import quantity
from reports.renderers.document import Block, Paragraph

if TYPE_CHECKING:
    from bench.plan import Plan
    from bench.record import RunOutline, RunRecord, RunStatus, RunSummary
    from bench.store import ResultsStore


@dataclass(frozen=True)
class RunLine:
    """The newest record of one planned run; `missing` has none.

    `current` is False where the code has changed since: `run` will repeat it. For an arm, since the
    plan was made, as its code is looked at only when it is prepared.
    """

    cell: str
    repeat: int
    state: str
    current: bool = True
    run_id: str = ""
    reason: str = ""
    arm: str | None = None


class StatusVerb(ResultsOption, name="status"):
    """Show which runs of a sweep are done or missing, or one run.

    Of a run: its configuration, how it ended and its numbers.

    Examples:
        status
        status quickstart
        status quickstart:ddp-fp32 --json
        status 8f3a --logs
    """

    name: str | None = argument(
        "SWEEP|RUN",
        "A sweep id; a run id, a unique part of one, or SWEEP:CELL; or the id of a validation."
        " All sweeps if left out.",
        None,
    )
    logs: bool = option("--logs", "Print what the processes of the run printed.", False)

    def run(self) -> Answer:
        """Every sweep in a line, the runs of one, one run or what it printed, or a validation."""
        from bench.cli.validate import of_validation
        from bench.store.documents import PREFIX

        store, name = self.store(), self.name
        if self.logs:
            if name is None:
                raise UsageError(
                    "--logs prints what the processes of one run printed: name the run"
                )
            return _logs(*store.find(name))
        if name is None:
            return _of_sweeps(store, store.sweeps())
        if name.startswith(PREFIX):
            return of_validation(store.validations.read(name))
        if sweeps := store.sweeps_called(name) or [name] * any(store.statuses(name)):
            return _of_sweeps(store, sweeps, name)
        return self._of_run(store, *_run_called(store, name))

    def _of_run(self, store: ResultsStore, run_id: str, folder: Path) -> Answer:
        from bench.derive.summary import summarise

        record = store.read(run_id)
        again, summary = rerun_command(store, record, self.results), summarise(record)
        data = {
            "run_id": record.run_id,
            "status": record.status.model_dump(mode="json"),
            "resolved": record.resolved.model_dump(mode="json"),
            "config_hash": record.resolved.config_hash,
            "summary": summary.model_dump(mode="json"),
            "steps_per_rank": {str(rank): len(steps) for rank, steps in record.steps.items()},
            "environment": record.environment,
            "memory": record.memory,
            "problems": list(record.problems),
            "folder": str(folder),
            "rerun": again,
        }
        rows = [
            ("run", record.run_id),
            ("folder", str(folder)),
            ("run it again", again or "its sweep does not plan it any more"),
            *_what_ran(record),
            *_numbers(record, summary),
        ]
        return Answer([columns(("what", "value"), rows)], data)


def _run_called(store: ResultsStore, name: str) -> tuple[str, Path]:
    """Id and folder; where there are none, the refusal says so of sweeps too."""
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
    from bench.plan import Plan

    is_one = sweep is not None and len(names) == 1
    records, damaged = store.outlines()
    plans: list[tuple[Plan, list[RunLine]]] = []
    for name in names:
        try:
            plan = Plan.from_document(store.read_plan(name))
        except UsageError:
            if is_one:
                raise
            console.note(f"warning: the plan of {name} cannot be read; plan or run it again")
        else:
            own = [record for record in records if record.status.sweep == name]
            plans.append((plan, _run_lines(plan, own)))
    lost = Counter(r.status.sweep for r in records if r.status.sweep not in {None, *names})
    for lost_name, count in sorted(lost.items(), key=str) if sweep is None else ():
        console.note(
            f"warning: {quantity.counted(count, 'run')} of sweep {lost_name}, whose plan is lost:"
            " run the sweep again, which writes the plan anew and counts what is finished"
        )
    for run in damaged:
        console.note(f"warning: {run.run_id} cannot be read: {run.problem}")
    data = [
        {
            "id": plan.id,
            "description": plan.description,
            "runs": [asdict(line) for line in lines],
            "pruned": [asdict(cell) for cell in plan.pruned],
            "duplicates": [asdict(cell) for cell in plan.duplicates],
        }
        for plan, lines in plans
    ]
    return Answer(
        _details(*plans[0]) if is_one else _overview(plans),
        {"sweeps": data, "damaged": [asdict(run) for run in damaged]},
    )


def _run_lines(plan: Plan, records: Sequence[RunOutline]) -> list[RunLine]:
    from bench.launch.code import code_identity
    from bench.launch.inputs import code_now
    from sweeps.blocks import planned_runs
    from sweeps.resume import newest, remembered, standing_in

    past = newest(standing_in(plan, records))
    codes: dict[tuple[str, str | None], str] = plan.codes
    if not plan.arms:
        code_here = remembered(code_identity)
        codes = {(cell.id, None): code_here(cell.resolved) for cell in plan.cells}
    lines = []
    for run in planned_runs(plan):
        record = past.get((run.cell.of(run.arm).config_hash, run.repeat, run.arm))
        if record is None:
            lines.append(RunLine(run.cell.id, run.repeat, "missing", arm=run.arm))
            continue
        status = record.status
        line = RunLine(
            run.cell.id,
            run.repeat,
            "damaged" if record.damage else status.state,
            status.code == code_now(codes.get((run.cell.id, run.arm), ""), status),
            record.run_id,
            "; ".join(record.damage) or status.reason,
            run.arm,
        )
        lines.append(line)
    return lines


def _overview(plans: Sequence[tuple[Plan, Sequence[RunLine]]]) -> list[Block]:
    if not plans:
        return [Paragraph("no sweep has been run here")]
    rows = []
    for plan, lines in plans:
        states = Counter(line.state if line.current else "outdated" for line in lines)
        shown = ", ".join(f"{state} {count}" for state, count in sorted(states.items()))
        rows.append((plan.id, str(plan.runs), shown or "-", str(len(plan.pruned))))
    return [columns(("sweep", "runs", "states", "pruned"), rows)]


def _details(plan: Plan, lines: Sequence[RunLine]) -> list[Block]:
    rows = [
        (
            f"{line.cell} [{line.arm}]" if line.arm else line.cell,
            str(line.repeat),
            line.state if line.current else f"{line.state} (code changed)",
            line.run_id.rpartition("/")[2] or "-",
            line.reason or "-",
        )
        for line in lines
    ]
    table = columns(("cell", "repeat", "state", "run", "reason"), rows)
    title = Paragraph(f"{plan.id}: {plan.description}".rstrip(": "))
    return [title, *([table] if rows else []), *pruned_cells(plan)]


def rerun_command(store: ResultsStore, record: RunRecord, results: Path) -> str | None:
    """The command that makes this run once more; None where its sweep does not plan it any more."""
    from bench.plan import Plan
    from sweeps.settings import shown_value

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


_PROOFS = {
    "proven": "proven by every rank",
    "mismatch": "not what the ranks found",
    None: "not proven",
}


def _what_ran(record: RunRecord) -> list[tuple[str, str]]:
    status, resolved = record.status, record.resolved
    train, launch, dtypes = resolved.train, resolved.launch, resolved.dtypes
    which = f"repeat {status.repeat}" + (f", arm {status.arm}" if status.arm else "")
    which += f", attempt {status.attempt} at its block" if status.attempt else ""
    threads = quantity.counted(launch.threads_per_rank, "thread")
    rows = [
        ("state", status.state + (f": {status.reason}" if status.reason else "")),
        ("sweep, cell", f"{status.sweep or '-'}, {status.cell or '-'} ({which})"),
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
        ("ranks", f"{launch.ranks} on {launch.device}, {threads} each"),
        ("steps", f"{min(map(len, record.steps.values()), default=0)} of {train.steps}"),
    ]
    if record.placement is not None:
        nodes = record.placement.ranks_by_node.items()
        shown = [f"{node}: {ranks[0]} to {ranks[-1]}" for node, ranks in nodes]
        rows.append(("ranks by node", ", ".join(shown)))
    return rows


def _numbers(record: RunRecord, summary: RunSummary) -> list[tuple[str, str]]:
    from bench.derive.metrics import MEMORY, METRICS

    rows = [
        (metric.title, quantity.amount(value, metric.unit))
        for metric in METRICS
        if metric is not MEMORY and (value := metric.of(record, summary)) is not None
    ]
    if summary.steady is not None:
        steady = summary.steady
        window = f"steps {steady.first} to {steady.last}" if steady.stable else "not stable"
        rows.append(("steady state", f"{window} ({steady.reason or steady.method})"))
    rows += [
        (f"memory: {name.replace('_', ' ')}", quantity.binary_bytes(size))
        for name, size in sorted(
            summary.memory_by_category_bytes.items(), key=lambda item: -item[1]
        )
    ]
    rows += [("not measured", note) for note in summary.notes]
    return rows + [("problem", problem) for problem in record.problems]


def _started(status: RunStatus) -> str:
    """Start, and how long it took where both ends are known."""
    if not status.started_utc:
        return "-"
    begun = datetime.fromisoformat(status.started_utc)
    text = f"{begun:%Y-%m-%d %H:%M:%S} UTC"
    if status.ended_utc is None:
        return text
    seconds = (datetime.fromisoformat(status.ended_utc) - begun).total_seconds()
    return f"{text}, took {quantity.duration(seconds)}"


def _logs(run_id: str, folder: Path) -> Answer:
    """What the processes of a run printed, each file below its name; its characters stay."""
    texts = {
        file.name: file.read_text(encoding="utf-8", errors="replace")
        for file in sorted((folder / "logs").glob("*.log"))
    }
    return Answer(
        "\n".join(f"==> {name} <==\n{text.rstrip()}" for name, text in texts.items()),
        {"run_id": run_id, "logs": texts},
        remarks=() if texts else (f"{run_id} has no logs",),
    )
