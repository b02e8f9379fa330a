"""`run`: a plan becomes records, with progress on stderr and an exit code that says how it went."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, replace
from itertools import islice
from typing import TYPE_CHECKING, Any

from bench.cli import console, exit_codes
from bench.cli.verb import (
    DEFAULT_RESULTS,
    Answer,
    BudgetOption,
    ResultsOption,
    SweepOptions,
    option,
    pruned_cells,
)
from bench.errors import UsageError
from bench.redaction import redact_text
from reports.renderers import quantity
from reports.renderers.document import Block, Paragraph, TableBlock
from reports.renderers.render import render
from reports.renderers.table import Row, RowKind, Table

if TYPE_CHECKING:
    from bench.derive.metrics import Metric
    from bench.launch.protocol import Launcher
    from bench.plan import Plan
    from bench.store import ResultsStore
    from reports.views.cells import Cell
    from sweeps.budget import BlockBudget
    from sweeps.resume import PastRun, RunOptions
    from sweeps.runner import SweepOutcome
    from sweeps.selected_sweep import SelectedSweep

# For the record and the terminal, after a second Ctrl-C has killed the ranks.
_SECONDS_AFTER_THE_SECOND = 5.0


class RunVerb(BudgetOption, SweepOptions, ResultsOption, name="run"):
    """Run what is missing of a sweep.

    Finished runs of the same configuration and code are kept. The table of results goes to
    stdout, progress and remarks to stderr. With --budget, blocks of the arms are added until the
    time is spent.

    Examples:
        run quickstart --report
        run my.yaml --repeat 3
        run my.yaml --arm base=main --arm head=. --interleave --repeat 8
        run my.yaml --launcher command --launcher-option hosts=hosts.txt
    """

    block_retries: int = option(
        "--block-retries N", "How often a block is started again after a fault.", 2, min=0
    )
    force: bool = option("--force", "Run finished cells again.", False)
    retry_failed: bool = option("--retry-failed", "Run failed cells again.", False)
    max_failures: int | None = option("--max-failures N", "Stop after N failed runs.", min=1)
    report: bool = option("--report", "Write the report and print its path at the end.", False)

    def run(self) -> Answer:
        """Plan, run what is missing, and say what came out; nothing is run by wrong options."""
        from bench.cli.launchers import read_launcher

        if self.budget is not None and self.repeat is not None:
            raise UsageError("--budget finds the number of blocks itself; leave --repeat out")
        if self.budget is not None and self.force:
            raise UsageError(
                "--budget adds blocks to those that are there, and --force sets them aside; "
                "name another results folder to begin anew"
            )
        kind, settings = read_launcher(self.launcher, self.launcher_options)
        sweep = self.select_arms(kind.machine(settings), interleave=self.budget is not None)
        store = self.store(create=True)
        if kind.elsewhere:
            _refuse_credentials(sweep.chosen)
        return self.run_selected(sweep, store, kind.start(settings))

    def run_selected(
        self, sweep: SelectedSweep, store: ResultsStore, launcher: Launcher | None = None
    ) -> Answer:
        """Run what is missing of a sweep whose arms are not prepared yet."""
        from sweeps.resume import RunOptions

        options = RunOptions(self.force, self.retry_failed, self.max_failures, self.block_retries)
        seconds = self.budget_seconds()
        sweep = sweep.prepared(store, console.note, launcher)
        if pruned := pruned_cells(sweep.chosen):
            console.note(f"{render(pruned, 'terminal')}\n")
        budget = None
        if seconds is None:
            outcome = run_missing(sweep, store, options)
        else:
            sweep, outcome, budget = run_within(sweep, store, options, seconds)
        report, failure = None, None
        if self.report and not outcome.interrupted:
            report, failure = _report(store, sweep.id)
        codes = [outcome_code(sweep.chosen, outcome)]
        codes += [exit_codes.of_error(failure)] if failure else []
        code = exit_codes.worst(codes)
        data = _data(sweep.chosen, outcome, code) | {"report": report}
        data |= {"error": redact_text(str(failure))} if failure else {}
        data |= {"budget": budget.to_data()} if budget else {}
        document: list[Block] = results_table(store, sweep.chosen)
        document += [Paragraph(report)] if report else []
        hint = []
        if outcome.good and not (outcome.interrupted or report):
            where = "" if self.results == DEFAULT_RESULTS else f" --results {self.results}"
            hint = [f"report: mfsdp-bench report {sweep.id}{where}"]
        console.note("")  # below the progress
        remarks = ("", *closing_lines(sweep.chosen, outcome), *hint)
        return Answer(document, data, code, remarks, failure)


def _refuse_credentials(plan: Plan) -> None:
    """Refuse what a file cannot hand on to another host.

    Raises:
        UsageError: a setting with a credential in it, which is written nowhere.
    """
    for cell in plan.cells:
        for run in (cell.resolved, *cell.by_arm.values()):
            written = run.model_dump(mode="json")["launch"]["env"]
            names = [name for name, value in run.launch.env.items() if written.get(name) != value]
            if names:
                raise UsageError(
                    f"cell {cell.id}: env.{names[0]} holds a credential, which is kept out of all"
                    " files, so another host would not get it; export the variable where you start"
                    " from, and take it out of the sweep"
                )


def _report(store: ResultsStore, sweep: str) -> tuple[str | None, Exception | None]:
    """Where the report is, or why there is none: its runs are made, and shown all the same."""
    from bench.cli.report import write_report_on

    try:
        return str(write_report_on(store, [sweep]).html), None
    except Exception as error:
        return None, error


def run_within(
    sweep: SelectedSweep, store: ResultsStore, options: RunOptions, seconds: float
) -> tuple[SelectedSweep, SweepOutcome, BlockBudget]:
    """Add blocks of an interleaved sweep with prepared arms until the time is spent.

    Returns:
        The sweep with as many repeats as there are blocks now, what was run, and the clock.
    """
    from bench.plan import Plan
    from sweeps.budget import BlockBudget

    if len(sweep.full_plan.arms) < 2:  # noqa: PLR2004 - base and head
        raise UsageError("--budget adds blocks of several arms; add one, as --arm head=.")
    budget = BlockBudget(seconds)
    outcome = run_missing(sweep, store, options, budget)
    spent, given = quantity.duration(budget.spent_seconds), quantity.duration(seconds)
    console.note(f"blocks: {budget.blocks} in {spent} of {given}")
    if sweep.chosen.cells:
        sweep = replace(sweep, full_plan=Plan.from_document(store.read_plan(sweep.id)))
    return sweep, outcome, budget


def run_to_judge(sweep: SelectedSweep, store: ResultsStore) -> SweepOutcome:
    """Run what is missing of a prepared sweep; a KeyboardInterrupt where somebody ended it."""
    from sweeps.resume import RunOptions

    outcome = run_missing(sweep, store, RunOptions())
    for line in closing_lines(sweep.chosen, outcome):
        console.note(line)
    if outcome.interrupted:
        raise KeyboardInterrupt
    return outcome


def run_missing(
    sweep: SelectedSweep,
    store: ResultsStore,
    options: RunOptions,
    budget: BlockBudget | None = None,
) -> SweepOutcome:
    """Run what is missing of a prepared sweep, or what `budget` names; progress on stderr.

    Ctrl-C ends the current run and the rest.
    """
    from bench.cli.interrupts import stop_on_signals
    from bench.cli.live_display import progress_display
    from bench.launch.watch import StopRequest
    from sweeps.progress import Remark
    from sweeps.runner import run_sides

    stop = StopRequest()
    with (
        progress_display(sys.stderr) as publish,
        stop_on_signals(
            stop,
            lambda hint: publish(Remark(hint, is_warning=True)),
            last_seconds=_SECONDS_AFTER_THE_SECOND,
        ),
    ):
        return run_sides(
            sweep.chosen,
            store,
            sides=sweep.sides,
            options=options,
            kept=sweep.full_plan,
            stop=stop,
            publish=publish,
            budget=budget,
        )


def outcome_code(plan: Plan, outcome: SweepOutcome) -> int:
    """130 interrupted; 3 if a run failed, or none gave a number (all pruned, all unsteady); else 0.

    An unsteady run among steady ones is a remark, not a failure.
    """
    if outcome.interrupted:
        return exit_codes.INTERRUPTED
    measured = plan.cells and any(run.state == "ok" for run in outcome.good)
    return exit_codes.NOTHING_MEASURED if outcome.failed or not measured else exit_codes.OK


def closing_lines(plan: Plan, outcome: SweepOutcome) -> list[str]:
    """What happened, in a few lines for stderr."""
    if not plan.cells:
        return [f"nothing was run: all {plan.size} cells of {plan.id} are pruned (reasons above)"]
    done_now = len(outcome.good) - len(outcome.done_before)
    stopped = f" {len(outcome.ended_by_user)} interrupted," if outcome.ended_by_user else ""
    lines = [
        f"{plan.id}: {len(outcome.good)} of {plan.runs} runs finished"
        f" ({done_now} now, {len(outcome.done_before)} before),"
        f" {len(outcome.failed)} failed,{stopped} {outcome.not_started} not started"
    ]
    lines += [
        f"  {_name(run)}: {run.state}: {run.reason or 'no reason was recorded'}"
        f" -- mfsdp-bench status {run.run_id.rpartition('/')[2]} --logs"
        for run in outcome.failed
    ]
    lines += [
        f"  {_name(run)}: no time is reported: {run.reason}"
        for run in outcome.good
        if run.state == "unstable"
    ]
    if outcome.lost:
        lines.append(
            f"{len(outcome.lost)} runs do not count: their blocks lost another run, or were stopped"
        )
    if outcome.interrupted:
        lines.append("interrupted: what is finished is kept; the same command goes on from here")
    if outcome.failed_before:
        lines.append("runs that failed before are not repeated unasked: add --retry-failed")
    return lines


def _name(run: PastRun) -> str:
    arm = f", arm {run.arm}" if run.arm else ""
    return f"{run.cell} (repeat {run.repeat}{arm})"


def _data(plan: Plan, outcome: SweepOutcome, code: int) -> dict[str, Any]:
    kinds = ("ran", "done_before", "failed_before", "lost")
    return {
        "sweep": plan.id,
        "exit_code": code,
        "interrupted": outcome.interrupted,
        **{kind: [asdict(run) for run in getattr(outcome, kind)] for kind in kinds},
        "not_started": outcome.not_started,
        "pruned": [
            {"id": cell.id, "rule": cell.rule, "reason": cell.reason} for cell in plan.pruned
        ],
    }


def results_table(store: ResultsStore, plan: Plan) -> list[Block]:
    """A row per cell of `plan` with a run, new or from before; nothing where there is none."""
    from bench.derive.metrics import LOSS, MEMORY_PEAKS, STEP_TIME, THROUGHPUT
    from reports.views.sweep_view import load_sweeps

    chosen = {cell.id for cell in plan.cells}
    view = load_sweeps(store, [plan.id])[0]
    cells = [cell for cell in view.cells if cell.name_without_arm in chosen]
    finished = [cell for cell in cells if cell.finished]
    memory = (m for m in MEMORY_PEAKS if finished and all(cell.values(m) for cell in finished))
    metrics = [STEP_TIME, THROUGHPUT, LOSS, *islice(memory, 1)]
    titles = ("cell", "runs", *(metric.title for metric in metrics))
    rows = [_row(cell, metrics) for cell in cells]
    return [TableBlock(Table.of(titles, rows))] if rows else []


def _row(cell: Cell, metrics: Sequence[Metric]) -> Row:
    states = Counter(run.record.status.state for run in cell.runs)
    failed = any(not run.finished for run in cell.runs)
    kind: RowKind = "bad" if failed else "plain" if cell.n else "unsteady"
    counts = ", ".join(f"{count} {state}" for state, count in states.items())
    return Row((cell.name, counts, *map(cell.text, metrics)), kind)
