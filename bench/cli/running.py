"""`run`: a plan becomes records, with progress on stderr and an exit code that says how it went."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, replace
from itertools import islice

from bench.cli import console, exit_codes
from bench.cli.chosen_sweep import ChosenSweep, choose, pruned_text
from bench.cli.console import Answer
from bench.cli.interrupts import stop_on_signals
from bench.cli.live_display import progress_display
from bench.cli.options import DEFAULT_RESULTS, duration, parsed_seconds
from bench.cli.reporting import write_sweep_report
from bench.cli.verbs.measure import RunRequest
from bench.derive.metrics import LOSS, MEMORY_PEAKS, STEP_TIME, THROUGHPUT, Metric
from bench.errors import UsageError
from bench.launch.watch import StopRequest
from bench.plan import Plan
from bench.redaction import redact_text
from bench.store import ResultsStore
from reports.renderers import terminal
from reports.renderers.table import Row, RowKind, Table
from reports.views.cells import Cell
from reports.views.sweep_view import load_sweeps
from sweeps.budget import BlockBudget
from sweeps.progress import Remark
from sweeps.resume import PastRun, RunOptions
from sweeps.runner import SweepOutcome, run_sides

# For the record and the terminal, after a second Ctrl-C has killed the ranks.
_SECONDS_AFTER_THE_SECOND = 5.0


def run_sweep(request: RunRequest) -> Answer:
    """Plan, run what is missing, and say what came out.

    Raises:
        UsageError: the sweep, an arm or an option is wrong; nothing has been run.
    """
    wanted = request.wanted
    if request.budget is not None:
        if wanted.repeat is not None:
            raise UsageError("--budget finds the number of blocks itself; leave --repeat out")
        if request.force:
            raise UsageError(
                "--budget adds blocks to those that are there, and --force sets them aside; "
                "name another results folder to begin anew"
            )
        wanted = replace(wanted, interleave=True)
    sweep = choose(wanted)
    store = ResultsStore.open(request.results, create=True)
    if sweep.launcher.elsewhere:
        _refuse_credentials(sweep.chosen)
    return run_and_tell(sweep, store, request)


def run_and_tell(sweep: ChosenSweep, store: ResultsStore, request: RunRequest) -> Answer:
    """Run what is missing of a sweep whose arms are not prepared yet, and say what came out."""
    options = RunOptions(
        request.force, request.retry_failed, request.max_failures, request.block_retries
    )
    seconds = None if request.budget is None else parsed_seconds(request.budget, "--budget")
    sweep = sweep.prepared(store)
    if sweep.chosen.pruned:
        console.note(f"{pruned_text(sweep.chosen)}\n")
    budget = None
    if seconds is None:
        outcome = run_missing(sweep, store, options)
    else:
        sweep, outcome, budget = run_within(sweep, store, options, seconds)
    plan = sweep.chosen
    report, failure = None, None
    if request.report and not outcome.interrupted:
        report, failure = _report(store, sweep.id)
    codes = [outcome_code(plan, outcome)]
    codes += [exit_codes.of_error(failure)] if failure else []
    code = exit_codes.worst(codes)

    def document() -> dict[str, object]:
        found = _outcome_document(plan, outcome, code) | {"report": report}
        found |= {"error": redact_text(str(failure))} if failure else {}
        return found if budget is None else found | {"budget": budget.to_data()}

    return Answer(
        document,
        lambda: "\n\n".join(filter(None, (_results(store, plan), report))),
        code,
        ("", *closing_lines(plan, outcome), *_hint(sweep, outcome, request, report)),
        failure=failure,
    )


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
    try:
        return str(write_sweep_report(store, sweep).html), None
    except Exception as error:
        return None, error


def _hint(
    sweep: ChosenSweep, outcome: SweepOutcome, request: RunRequest, report: str | None
) -> list[str]:
    """What can be done next."""
    where = "" if request.results == DEFAULT_RESULTS else f" --results {request.results}"
    if outcome.good and not (outcome.interrupted or report):
        return [f"report: mfsdp-bench report {sweep.id}{where}"]
    return []


def _results(store: ResultsStore, plan: Plan) -> str:
    table = results_table(store, plan)
    return "" if table is None else f"\n{terminal.table(table)}"


def run_within(
    sweep: ChosenSweep,
    store: ResultsStore,
    options: RunOptions,
    seconds: float,
) -> tuple[ChosenSweep, SweepOutcome, BlockBudget]:
    """Add blocks until the time is spent.

    Args:
        sweep: interleaved, with prepared arms.
        store: the results folder.
        options: what to repeat.
        seconds: that there are.

    Returns:
        The sweep with as many repeats as there are blocks now, what was run, and the clock.
    """
    if len(sweep.whole.arms) < 2:  # noqa: PLR2004 - base and head
        raise UsageError("--budget adds blocks of several arms; add one, as --arm head=.")
    budget = BlockBudget(seconds)
    outcome = run_missing(sweep, store, options, budget)
    spent = duration(budget.spent_seconds)
    console.note(f"blocks: {budget.blocks} in {spent} of {duration(seconds)}")
    if sweep.chosen.cells:
        sweep = replace(sweep, whole=Plan.from_document(store.read_plan(sweep.id)))
    return sweep, outcome, budget


def run_to_judge(sweep: ChosenSweep, store: ResultsStore) -> SweepOutcome:
    """Run what is missing of a prepared sweep, for a verb that then looks at its records.

    Raises:
        KeyboardInterrupt: somebody ended it.
    """
    outcome = run_missing(sweep, store, RunOptions())
    for line in closing_lines(sweep.chosen, outcome):
        console.note(line)
    if outcome.interrupted:
        raise KeyboardInterrupt
    return outcome


def run_missing(
    sweep: ChosenSweep,
    store: ResultsStore,
    options: RunOptions,
    budget: BlockBudget | None = None,
) -> SweepOutcome:
    """Run what is missing of a prepared sweep, or what `budget` names; progress on stderr.

    Ctrl-C ends the current run and the rest.
    """
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
            whole=sweep.whole,
            stop=stop,
            publish=publish,
            budget=budget,
        )


def outcome_code(plan: Plan, outcome: SweepOutcome) -> int:
    """130 interrupted; 3 if a run failed, or none gave a number (all pruned, all unsteady); else 0.

    An unsteady run among steady ones is a remark, not a failure.
    """
    codes = [exit_codes.OK]
    if outcome.interrupted:
        codes.append(exit_codes.INTERRUPTED)
    if outcome.failed or not plan.cells or not any(run.state == "ok" for run in outcome.good):
        codes.append(exit_codes.NOTHING_MEASURED)
    return exit_codes.worst(codes)


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


def _outcome_document(plan: Plan, outcome: SweepOutcome, code: int) -> dict[str, object]:
    return {
        "sweep": plan.id,
        "exit_code": code,
        "interrupted": outcome.interrupted,
        "ran": [asdict(run) for run in outcome.ran],
        "done_before": [asdict(run) for run in outcome.done_before],
        "failed_before": [asdict(run) for run in outcome.failed_before],
        "lost": [asdict(run) for run in outcome.lost],
        "not_started": outcome.not_started,
        "pruned": [
            {"id": cell.id, "rule": cell.rule, "reason": cell.reason} for cell in plan.pruned
        ],
    }


def results_table(store: ResultsStore, plan: Plan) -> Table | None:
    """A row per cell of `plan` with a run, new or from before; None where there is none."""
    chosen = {cell.id for cell in plan.cells}
    view = load_sweeps(store, [plan.id])[0]
    cells = [cell for cell in view.cells if cell.name_without_arm in chosen]
    if not cells:
        return None
    finished = [cell for cell in cells if cell.finished]
    memory = (m for m in MEMORY_PEAKS if finished and all(cell.values(m) for cell in finished))
    metrics = [STEP_TIME, THROUGHPUT, LOSS, *islice(memory, 1)]
    titles = ("cell", "runs", *(metric.title for metric in metrics))
    return Table.of(titles, (_row(cell, metrics) for cell in cells))


def _row(cell: Cell, metrics: Sequence[Metric]) -> Row:
    states = Counter(run.record.status.state for run in cell.runs)
    failed = [run for run in cell.runs if not run.finished]
    kind: RowKind = "bad" if failed else "plain" if cell.n else "unsteady"
    counts = ", ".join(f"{count} {state}" for state, count in states.items())
    return Row((cell.name, counts, *map(cell.text, metrics)), kind)
