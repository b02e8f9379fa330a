"""`run`: a plan becomes records, with progress on stderr and an exit code that says how it went."""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from bench.cli import console, exit_codes
from bench.cli.arm_preparation import prepared_sides
from bench.cli.interrupts import stop_on_signals
from bench.cli.launchers import PRINT, cancel_hint, job_request
from bench.cli.planning import Request, RequestedPlan, pruned_text, requested_plan
from bench.errors import UsageError
from bench.launch.slurm.queue import SlurmQueue
from bench.launch.slurm.settings import SlurmSettings
from bench.launch.slurm.submission import batch_script
from bench.launch.stop_request import StopRequest
from bench.store import ResultsStore
from sweeps.execution import Sides
from sweeps.plan import Plan
from sweeps.progress import Stopping
from sweeps.queued import run_queued, write_scripts
from sweeps.resume import PastRun
from sweeps.runner import DEFAULT_BLOCK_RETRIES, RunOptions, SweepOutcome, run_sides
from sweeps.submitting import Submission

# For the record and the terminal, after a second Ctrl-C has killed the ranks.
_SECONDS_AFTER_THE_SECOND = 5.0
_JOBS_GO_ON = "leaving; the jobs go on"


@dataclass(frozen=True)
class Options:
    """Options of `run` that are not about the sweep itself."""

    results: Path
    force: bool
    retry_failed: bool
    max_failures: int | None
    report: bool
    as_json: bool
    block_retries: int = DEFAULT_BLOCK_RETRIES
    seed: int | None = None

    @property
    def of_runs(self) -> RunOptions:
        """What to repeat, and when to give up."""
        return RunOptions(
            self.force, self.retry_failed, self.max_failures, self.block_retries, self.seed
        )


def run_sweep(request: Request, options: Options) -> int:
    """Plan, run what is missing, and say what came out."""
    plans = requested_plan(request)
    _check_options(plans, options)
    store = ResultsStore.open(options.results, create=True)
    plans, sides = prepared_sides(plans, store)
    if plans.chosen.pruned:
        console.note(f"{pruned_text(plans.chosen)}\n")
    if plans.launcher == PRINT:
        return _write_scripts(plans, sides, store, options)
    outcome = run_planned(plans, sides, store, options)
    code = outcome_code(plans.chosen, outcome)
    if not options.as_json:
        _show_results(store, plans.chosen)
    for line in closing_lines(plans.chosen, outcome):
        console.note(line)
    if outcome.interrupted and plans.slurm is not None:
        console.note(
            f"the jobs are left alone; to end them: {cancel_hint(plans.chosen.id, options.results)}"
        )
    report: str | None = None
    if options.report and not outcome.interrupted:
        from bench.cli.reporting import write_sweep_report

        report = str(write_sweep_report(store, plans.chosen.id).html)
    elif not outcome.interrupted and outcome.good:
        where = "" if options.results == Path("results") else f" --results {options.results}"
        console.note(f"report: mfsdp-bench report {plans.chosen.id}{where}")
    if options.as_json:
        console.data_json(_outcome_document(plans.chosen, outcome, code) | {"report": report})
    elif report is not None:
        console.data(report)
    return code


def _show_results(store: ResultsStore, plan: Plan) -> None:
    from bench.cli.results_table import results_table
    from reports.renderers import terminal

    table = results_table(store, plan)
    if table is not None:
        console.data(f"\n{terminal.table(table)}\n")


def _check_options(plans: RequestedPlan, options: Options) -> None:
    if options.seed is not None and not plans.chosen.interleaved:
        raise UsageError(
            "--seed decides the order of interleaved arms; add --interleave, or leave it out"
        )
    if options.max_failures is not None and plans.slurm is not None:
        raise UsageError("--max-failures ends a sweep on this machine; jobs do not know each other")


def run_planned(
    plans: RequestedPlan, sides: Sides, store: ResultsStore, options: Options
) -> SweepOutcome:
    """Run what is missing, with progress on stderr; Ctrl-C ends the current run and the rest."""
    from bench.cli.live_display import progress_display

    stop = StopRequest()
    make = run_sides if plans.slurm is None else partial(run_queued, _submission(plans, sides))
    with (
        progress_display(sys.stderr) as publish,
        stop_on_signals(
            stop,
            lambda hint: publish(Stopping(hint if plans.slurm is None else _JOBS_GO_ON)),
            last_seconds=_SECONDS_AFTER_THE_SECOND,
        ),
    ):
        return make(
            plans.chosen,
            store,
            sides=sides,
            options=options.of_runs,
            whole=plans.whole,
            stop=stop,
            publish=publish,
        )


def _submission(plans: RequestedPlan, sides: Sides) -> Submission:
    settings = plans.slurm or SlurmSettings()
    return Submission(
        SlurmQueue(settings),
        {arm: side.code for arm, side in sides.items()},
        settings.model_dump(mode="json"),
        job_request,
        settings.poll_seconds,
    )


def _write_scripts(
    plans: RequestedPlan, sides: Sides, store: ResultsStore, options: Options
) -> int:
    """`--launcher print`: paths to stdout, one per script."""
    settings = plans.slurm or SlurmSettings()
    scripts = write_scripts(
        _submission(plans, sides),
        plans.chosen,
        store,
        script=lambda request, count: batch_script(request, settings, count),
        sides=sides,
        options=options.of_runs,
        whole=plans.whole,
    )
    if options.as_json:
        console.data_json({"sweep": plans.chosen.id, "scripts": [str(path) for path in scripts]})
    else:
        for path in scripts:
            console.data(str(path))
    console.note(
        f"{len(scripts)} scripts for sbatch; once submitted, the same command with --launcher slurm"
        " finds their jobs and follows them"
    )
    return exit_codes.OK


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
        f" -- mfsdp-bench logs {run.run_id.rpartition('/')[2]}"
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
