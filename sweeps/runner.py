"""Runs what is missing of a plan, one run after another, and keeps a record of each.

A failed run is a record and the sweep goes on. A set `stop` event ends the current run and the
sweep. What cannot be kept (a full disk) ends the sweep: measuring on would be measuring nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from threading import Event

from bench.errors import UsageError
from bench.record import FINISHED_GOOD, STOPPED
from bench.store.results_store import ResultsStore
from sweeps.block_resume import (
    BlocksProgressed,
    MissingBlock,
    attempts_started,
    compare_blocks,
    runs_by_block,
)
from sweeps.block_runner import run_blocks
from sweeps.execution import RunMaker, Sides
from sweeps.interleave import draw_seed, planned_blocks
from sweeps.packing import run_packed
from sweeps.plan import Plan
from sweeps.progress import Subscriber, SweepStarted, SweepStopped, ignore
from sweeps.resume import (
    PastRun,
    PlannedRun,
    Progressed,
    compare_with_records,
    lines_of_repeats,
    planned_runs,
)

DEFAULT_BLOCK_RETRIES = 2


@dataclass(frozen=True)
class RunOptions:
    """What to run again, and when to give up.

    force: every run, done or not. retry_failed: runs whose record says they failed.
    max_failures: stop after so many failed runs of this call; None never stops. block_retries: how
    often an interleaved block that a fault cost is started again. seed: of the order of the arms;
    None is the recorded one, or a new one that is recorded.
    """

    force: bool = False
    retry_failed: bool = False
    max_failures: int | None = None
    block_retries: int = DEFAULT_BLOCK_RETRIES
    seed: int | None = None


@dataclass(frozen=True)
class SweepOutcome:
    """What a call did. `ran` holds the new records, `before` the reused ones.

    `lost`: new records of interleaved blocks that were started again, or given up; the run that
    ended a block that was given up is in `ran`.
    """

    ran: tuple[PastRun, ...]
    done_before: tuple[PastRun, ...]
    failed_before: tuple[PastRun, ...]
    not_started: int
    interrupted: bool
    lost: tuple[PastRun, ...] = ()

    @property
    def failed(self) -> tuple[PastRun, ...]:
        """Failed runs, new and old; one that was ended from outside has not failed."""
        neither = FINISHED_GOOD | STOPPED
        new = tuple(run for run in self.ran if run.state not in neither)
        return new + self.failed_before

    @property
    def ended_by_user(self) -> tuple[PastRun, ...]:
        """New runs that were ended from outside."""
        return tuple(run for run in self.ran if run.state in STOPPED)

    @property
    def good(self) -> tuple[PastRun, ...]:
        """Runs that finished, new and old."""
        return tuple(run for run in self.ran if run.state in FINISHED_GOOD) + self.done_before


def run_sides(
    plan: Plan,
    store: ResultsStore,
    *,
    sides: Sides,
    options: RunOptions | None = None,
    whole: Plan | None = None,
    stop: Event | None = None,
    publish: Subscriber = ignore,
) -> SweepOutcome:
    """Run what is missing of `plan`, holding the lock of the results folder.

    Args:
        plan: the cells to run.
        store: the results folder.
        sides: how runs are started, for every arm of the plan.
        options: what to repeat.
        whole: the plan to keep in the results folder where `plan` is a selection of it.
        stop: set it to end the current run and the sweep.
        publish: receives progress.

    Raises:
        UsageError: another runner holds the folder, or the blocks were drawn with another seed.
        NothingMeasuredError: the results folder cannot be written (a full disk).
    """
    stop = stop or Event()
    options = options or RunOptions()
    maker = RunMaker(plan.id, store, sides, stop, publish)
    with store.lock():
        plan, whole = as_recorded(plan, whole or plan, store, options)
        store.write_plan(plan.id, whole.to_document())
        return (_run_interleaved if plan.interleaved else _run_each)(plan, maker, options)


def as_recorded(
    plan: Plan, whole: Plan, store: ResultsStore, options: RunOptions
) -> tuple[Plan, Plan]:
    """Both plans with what an earlier call has decided for good.

    That is the seed of the order within blocks (recorded before, or given now, or drawn), and
    whether their number was once decided by looking at them.

    Raises:
        UsageError: given and recorded seed differ.
    """
    known = Plan.from_document(store.read_plan(plan.id)) if plan.id in store.sweeps() else None
    seed = _seed(plan, known, options)
    looked = whole.until_decided or (known is not None and known.until_decided)
    return (
        replace(plan, seed=seed, until_decided=looked),
        replace(whole, seed=seed, until_decided=looked),
    )


def _seed(plan: Plan, known_plan: Plan | None, options: RunOptions) -> int | None:
    if not plan.interleaved:
        return None
    recorded = None if known_plan is None else known_plan.seed
    given = options.seed
    if given is not None and recorded not in (None, given) and not options.force:
        raise UsageError(
            f"--seed {given}: the blocks of {plan.id} were drawn with seed {recorded}; leave --seed"
            " out to go on with them, or run all of them again with --force"
        )
    known = given if given is not None else recorded
    return draw_seed() if known is None else known


def _run_each(plan: Plan, maker: RunMaker, options: RunOptions) -> SweepOutcome:
    found = look_at_runs(plan, maker, options)
    again = again_lines(found.missing, maker)
    maker.publish(
        SweepStarted(plan.id, len(found.missing), len(found.done), len(found.failed), again)
    )
    make = run_packed if plan.pack else run_one_by_one
    ran = make(maker, found.missing, options.max_failures)
    return SweepOutcome(
        ran=tuple(ran),
        done_before=found.done,
        failed_before=found.failed,
        not_started=len(found.missing) - len(ran),
        interrupted=maker.stop.is_set(),
    )


def _run_interleaved(plan: Plan, maker: RunMaker, options: RunOptions) -> SweepOutcome:
    found = look_at_blocks(plan, maker, options)
    arms = len(plan.arms)
    to_run = len(found.missing_runs)
    again = again_lines(found.missing_runs, maker)
    maker.publish(SweepStarted(plan.id, to_run, len(found.done), len(found.failed), again))
    ran = run_blocks(
        maker,
        found.missing,
        total=to_run,
        retries=options.block_retries,
        max_failures=options.max_failures,
        turns=plan.turns,
    )
    return SweepOutcome(
        ran=tuple(ran.ended),
        done_before=found.done,
        failed_before=found.failed,
        not_started=(len(found.missing) - ran.started) * arms,
        interrupted=maker.stop.is_set(),
        lost=tuple(ran.lost),
    )


def again_lines(runs: Sequence[PlannedRun], maker: RunMaker) -> tuple[str, ...]:
    """Why runs that have a record run again, a line per reason."""
    records = maker.store.records(sweep=maker.sweep) if runs else ()
    return lines_of_repeats(runs, records, maker.code_before())


def look_at_runs(plan: Plan, maker: RunMaker, options: RunOptions) -> Progressed:
    """The runs of a plan without blocks, by what is known of them."""
    if options.force:
        return Progressed(tuple(planned_runs(plan)), (), ())
    records = maker.store.records(sweep=plan.id)
    found = compare_with_records(plan, records, maker.code_before())
    if not options.retry_failed:
        return found
    again = {(run.cell, run.repeat, run.arm) for run in found.failed}
    again |= {(run.cell.id, run.repeat, run.arm) for run in found.missing}
    missing = tuple(
        run for run in planned_runs(plan) if (run.cell.id, run.repeat, run.arm) in again
    )
    return Progressed(missing, found.done, ())


def look_at_blocks(plan: Plan, maker: RunMaker, options: RunOptions) -> BlocksProgressed:
    """The blocks of an interleaved plan, by what is known of them."""
    records = list(maker.store.records(sweep=plan.id))
    if not options.force:
        return compare_blocks(
            plan,
            records,
            maker.code_before(),
            retries=options.block_retries,
            retry_failed=options.retry_failed,
        )
    known = runs_by_block(records)
    missing = tuple(
        MissingBlock(block, 1 + attempts_started(block, known)) for block in planned_blocks(plan)
    )
    return BlocksProgressed(missing, (), ())


def run_one_by_one(
    maker: RunMaker, runs: tuple[PlannedRun, ...], max_failures: int | None
) -> list[PastRun]:
    """Make `runs`, until all are made or there is a reason to stop."""
    ended: list[PastRun] = []
    failures = 0
    for position, run in enumerate(runs, start=1):
        if maker.stop.is_set():
            maker.publish(SweepStopped("interrupted"))
            break
        past = maker.run(run, position, len(runs))
        ended.append(past)
        failures += past.state not in FINISHED_GOOD
        if past.wrong_code and run.arm is not None:
            reason = f"arm {run.arm} is not the code that was prepared any more; run again"
            maker.publish(SweepStopped(reason))
            break
        if max_failures is not None and failures >= max_failures and position < len(runs):
            maker.publish(
                SweepStopped(
                    f"{failures} failed run{'s' if failures > 1 else ''}, as many as --max-failures"
                )
            )
            break
    return ended
