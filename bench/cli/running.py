"""`run`: a plan becomes records, with progress on stderr and an exit code that says how it went."""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Event

from bench.cli import console, exit_codes
from bench.cli.interrupts import stop_on_signals
from bench.cli.planning import Request, pruned_text, requested_plan
from bench.launch import code_identity, launch
from bench.store import ResultsStore
from sweeps.plan import Plan
from sweeps.runner import RunOptions, SweepOutcome, run_plan


@dataclass(frozen=True)
class Options:
    """Options of `run` that are not about the sweep itself."""

    results: Path
    force: bool
    retry_failed: bool
    max_failures: int | None
    report: bool
    as_json: bool


def run_sweep(request: Request, options: Options) -> int:
    """Plan, run what is missing, and say what came out."""
    plans = requested_plan(request)
    store = ResultsStore.open(options.results, create=True)
    if plans.chosen.pruned:
        console.note(f"{pruned_text(plans.chosen)}\n")
    outcome = _run(plans.chosen, plans.whole, store, options)
    code = outcome_code(plans.chosen, outcome)
    for line in closing_lines(plans.chosen, outcome):
        console.note(line)
    report: str | None = None
    if options.report and not outcome.interrupted:
        from bench.cli.evidence import write_sweep_report

        report = str(write_sweep_report(store, plans.chosen.id).html)
    elif not outcome.interrupted and outcome.good:
        where = "" if options.results == Path("results") else f" --results {options.results}"
        console.note(f"report: mfsdp-bench report {plans.chosen.id}{where}")
    if options.as_json:
        console.data_json(_outcome_document(plans.chosen, outcome, code) | {"report": report})
    elif report is not None:
        console.data(report)
    return code


def _run(plan: Plan, whole: Plan, store: ResultsStore, options: Options) -> SweepOutcome:
    from bench.cli.live_display import progress_display

    stop = Event()
    with stop_on_signals(stop), progress_display(sys.stderr) as publish:
        return run_plan(
            plan,
            store,
            launch=launch,
            code_identity=code_identity,
            options=RunOptions(options.force, options.retry_failed, options.max_failures),
            whole=whole,
            stop=stop,
            publish=publish,
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
    lines = [
        f"{plan.id}: {len(outcome.good)} of {plan.runs} runs finished"
        f" ({len(outcome.ran)} now, {len(outcome.done_before)} before),"
        f" {len(outcome.failed)} failed, {outcome.not_started} not started"
    ]
    lines += [
        f"  {run.cell} (repeat {run.repeat}): {run.state}: {run.reason or 'no reason was recorded'}"
        f" -- mfsdp-bench logs {run.run_id.rpartition('/')[2]}"
        for run in outcome.failed
    ]
    lines += [
        f"  {run.cell} (repeat {run.repeat}): no time is reported: {run.reason}"
        for run in outcome.good
        if run.state == "unstable"
    ]
    if outcome.failed_before:
        lines.append("runs that failed before are not repeated unasked: add --retry-failed")
    return lines


def _outcome_document(plan: Plan, outcome: SweepOutcome, code: int) -> dict[str, object]:
    return {
        "sweep": plan.id,
        "exit_code": code,
        "interrupted": outcome.interrupted,
        "ran": [asdict(run) for run in outcome.ran],
        "done_before": [asdict(run) for run in outcome.done_before],
        "failed_before": [asdict(run) for run in outcome.failed_before],
        "not_started": outcome.not_started,
        "pruned": [
            {"id": cell.id, "rule": cell.rule, "reason": cell.reason} for cell in plan.pruned
        ],
    }
