"""A sweep through the queue of a cluster: submit what is missing, adopt what waits or runs, follow.

The runs are made by the jobs themselves (`sweeps.job_program`), so this process may end at any
time. Started again it reads the same files, asks the queue, and goes on following.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Any

from bench.store.results_store import ResultsStore
from sweeps.execution import RunMaker, Sides
from sweeps.following import Follower
from sweeps.jobs import JobArray, see_jobs, settle, without_secrets
from sweeps.plan import Plan
from sweeps.progress import Subscriber, SweepStarted, ignore
from sweeps.resume import PastRun, Progressed, RunOptions
from sweeps.runner import SweepOutcome, again_lines, as_recorded, look
from sweeps.submitting import Submission, Submitter


def run_queued(
    submission: Submission,
    plan: Plan,
    store: ResultsStore,
    *,
    sides: Sides,
    options: RunOptions,
    whole: Plan,
    stop: Event,
    publish: Subscriber,
) -> SweepOutcome:
    """As `sweeps.runner.run_sides`; a set `stop` leaves the jobs alone.

    Raises:
        UsageError: another runner holds the folder, or the queue takes no jobs.
    """
    maker = RunMaker(plan.id, store, sides, stop, publish)
    with store.lock():
        plan = _kept(plan, whole, store, options)
        seen = see_jobs(store, plan.id, submission.queue)
        settle(store, plan.id, seen)
        before = look(plan, maker, options)
        missing = _missing_by_cell(before)
        adopted = {
            cell: job
            for cell, (job, array) in seen.cells.items()
            if cell in missing and _same(plan, array, cell)
        }
        again = again_lines(before.missing_runs, maker)
        publish(
            SweepStarted(
                plan.id, len(before.missing_runs), len(before.done), len(before.failed), again
            )
        )
        known = {run_id for run_id, _, one in store.statuses(plan.id) if one.state != "running"}
        to_submit = {cell: runs for cell, runs in missing.items() if cell not in adopted}
        jobs = {*adopted.values(), *Submitter(submission, plan, store, options).submit(to_submit)}
        follower = Follower(maker, submission, jobs, told=known, total=len(before.missing_runs))
        follower.follow(len(adopted))
        after = look(plan, maker, replace(options, force=False, retry_failed=False))
        return _outcome(maker, before, after, known)


def write_scripts(
    submission: Submission,
    plan: Plan,
    store: ResultsStore,
    *,
    script: Callable[[Any, int], str],
    sides: Sides,
    options: RunOptions,
    whole: Plan,
) -> list[Path]:
    """Batch scripts of what is missing, for whoever submits them by hand; nothing is submitted."""
    maker = RunMaker(plan.id, store, sides, Event(), ignore)
    with store.lock():
        plan = _kept(plan, whole, store, options)
        cells = _missing_by_cell(look(plan, maker, options))
        return Submitter(submission, plan, store, options).write_scripts(cells, script)


def _kept(plan: Plan, whole: Plan, store: ResultsStore, options: RunOptions) -> Plan:
    """The plan with what was decided for good, once it stands in the results folder."""
    without_secrets(plan)
    plan, whole = as_recorded(plan, whole, store, options)
    store.write_plan(plan.id, whole.to_document())
    return plan


def _missing_by_cell(found: Progressed) -> dict[str, int]:
    """Cell -> number of its missing runs."""
    return dict(Counter(run.cell.id for run in found.missing_runs))


def _same(plan: Plan, array: JobArray, cell: str) -> bool:
    """The job makes the cell as it is planned today."""
    now, then = (next(one for one in p.cells if one.id == cell) for p in (plan, array.plan))
    return now.config_hashes == then.config_hashes and plan.interleaved == array.plan.interleaved


def _outcome(
    maker: RunMaker, before: Progressed, after: Progressed, known: set[str]
) -> SweepOutcome:
    """The difference that the jobs have made; the newest run that was cut short stands for it."""
    new = [
        PastRun(s.cell or "", s.repeat, run_id, s.state, s.reason, s.arm)
        for run_id, _, s in maker.store.statuses(maker.sweep)
        if run_id not in known and s.state != "running"
    ]
    decided = {run.run_id for run in (*after.done, *after.failed)}
    missing = {(run.cell.id, run.repeat, run.arm) for run in after.missing_runs}
    cut_short = {
        where: run
        for run in new
        if run.run_id not in decided and (where := (run.cell, run.repeat, run.arm)) in missing
    }
    ran = (*(run for run in new if run.run_id in decided), *cut_short.values())
    counted = {run.run_id for run in ran}
    return SweepOutcome(
        ran=ran,
        done_before=before.done,
        failed_before=before.failed,
        not_started=len(missing) - len(cut_short),
        interrupted=maker.stop.is_set(),
        lost=tuple(run for run in new if run.run_id not in counted),
    )
