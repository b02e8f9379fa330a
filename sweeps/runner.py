"""Runs what is missing of a plan, block by block, and keeps a record of every run.

A failed run is a record and the sweep goes on. If a fault costs a block of several arms, all of
them run again, as they are compared with each other; where such a block fails for good, its cell is
over for this call: its other blocks would most likely fail too, and every attempt costs a run of
every arm. A set `stop` event ends the current runs and the sweep. What cannot be kept (a full disk)
ends the sweep: measuring on would be measuring nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from threading import Event

from bench.plan import Plan
from bench.record import FINISHED_GOOD, STOPPED
from bench.store.results_store import ResultsStore
from bench.store.run_folder import dated
from sweeps.blocks import Block
from sweeps.budget import MOST_BLOCKS, BlockBudget, budgeted_blocks
from sweeps.execution import RunMaker, Sides
from sweeps.progress import BlockLost, Remark, Subscriber, SweepStarted
from sweeps.resume import (
    FAULTS,
    MissingBlock,
    PastRun,
    Progressed,
    RunOptions,
    compare_with_records,
)


@dataclass(frozen=True)
class SweepOutcome:
    """What a call did. `ran` holds the new records, `before` the reused ones.

    `lost`: new records of blocks that were started again, or given up; the run that ended a block
    that was given up is in `ran`.
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
    options: RunOptions,
    whole: Plan,
    stop: Event,
    publish: Subscriber,
    budget: BlockBudget | None = None,
) -> SweepOutcome:
    """Run what is missing of `plan`, holding the lock of the results folder.

    Args:
        plan: the cells to run.
        store: the results folder.
        sides: how runs are started, for every arm of the plan.
        options: what to repeat.
        whole: the plan to keep in the results folder, of which `plan` is a selection.
        stop: set it to end the current run and the sweep.
        publish: receives progress.
        budget: names the cell of every block, instead of the repeats of an interleaved plan.

    Raises:
        UsageError: another runner holds the folder.
        NothingMeasuredError: the results folder cannot be written (a full disk).
    """
    maker = RunMaker(plan.id, store, sides, stop, publish)
    with store.lock():
        if budget is None:
            store.write_plan(plan.id, whole.to_document())
            found = look(plan, maker, options)
            missing: Iterable[MissingBlock] = found.missing
            total, again = len(found.missing_runs), found.again
        else:
            found = look(plan.with_repeats(MOST_BLOCKS), maker, options)
            missing = budgeted_blocks(budget, whole, store, found)
            total, again = 0, ()  # nobody knows how many blocks it will take
        expected = None if budget else total
        for line in dated_ahead(store, plan.id):
            publish(Remark(line))
        publish(SweepStarted(plan.id, expected, len(found.done), len(found.failed), again))
        runner = BlockRunner(maker, options, total, budget)
        ended, lost = runner.run(missing)
        return SweepOutcome(
            ran=tuple(ended),
            done_before=found.done,
            failed_before=found.failed,
            not_started=0 if budget else total - runner.started,
            interrupted=maker.stop.is_set(),
            lost=tuple(lost),
        )


def dated_ahead(store: ResultsStore, sweep: str) -> tuple[str, ...]:
    """A line for runs whose date is ahead of this machine's clock."""
    now = datetime.now(UTC)
    dates = ((dated(run_id), run_id) for run_id, _, _ in store.statuses(sweep))
    ahead = [(moment, run_id) for moment, run_id in dates if moment is not None and moment > now]
    if not ahead:
        return ()
    moment, run_id = max(ahead)
    return (
        f"{run_id} is dated {moment:%Y-%m-%d %H:%M} UTC, ahead of this machine's clock: the runs of"
        " this call count as newer",
    )


def look(plan: Plan, maker: RunMaker, options: RunOptions) -> Progressed:
    """The blocks of a plan, by what the results folder knows of them."""
    records, _ = maker.store.outlines(plan.id)
    return compare_with_records(plan, records, maker.code_before(), options)


class BlockRunner:
    """Runs blocks, and counts what comes of them. `started`: runs of the blocks that were begun.

    Args:
        maker: makes single runs.
        options: how often a block that a fault cost is started again, and when to give up.
        total: runs that this will probably be, for the progress.
        budget: told about every block that has ended.
    """

    def __init__(
        self,
        maker: RunMaker,
        options: RunOptions,
        total: int,
        budget: BlockBudget | None = None,
    ) -> None:
        self._maker = maker
        self._options = options
        self._total = total
        self._budget = budget
        self.started = 0
        self._given_up: set[str] = set()
        self._failures = 0
        self._why_stop = ""
        self._wrong_code = False

    def run(self, missing: Iterable[MissingBlock]) -> tuple[list[PastRun], list[PastRun]]:
        """In order, until there are no more or there is a reason to stop.

        missing: may be decided on while it runs.

        Returns:
            Runs of complete blocks with the one that ended each failed block, and all other runs.
        """
        stop = self._maker.stop
        ended: list[PastRun] = []
        lost: list[PastRun] = []
        for one in missing:
            if one.block.cell.id in self._given_up:
                continue
            if not stop.is_set():
                ended_here, lost_here = self._run_block(one)
                ended += ended_here
                lost += lost_here
            if stop.is_set() or self._why_stop:
                break
        is_early = self._wrong_code or self._budget is not None or self.started < self._total
        if stop.is_set() or (self._why_stop and is_early):
            why = "interrupted" if stop.is_set() else self._why_stop
            self._maker.publish(Remark(f"stopped: {why}", is_warning=True))
        return ended, lost

    def _run_block(self, one: MissingBlock) -> tuple[list[PastRun], list[PastRun]]:
        """Run one block until it is complete or given up."""
        first, self.started = self.started + 1, self.started + len(one.block.arms)
        runs, lost = self._attempts(one, first)
        complete = _is_complete(one.block, runs)
        if self._budget is not None:
            self._budget.block_ended(one.block.cell.id, complete=complete)
        if complete:
            return runs, lost
        # A run that was stopped is reported where all were: then it is no fault of its block.
        stopped = [run for run in runs if run.state in STOPPED]
        ended = [run for run in runs if run.state not in FINISHED_GOOD | STOPPED] or stopped
        return ended, lost + [run for run in runs if run not in ended]

    def _attempts(self, one: MissingBlock, first: int) -> tuple[list[PastRun], list[PastRun]]:
        """The runs of the last attempt, and those of the ones before."""
        block, faults, attempt = one.block, one.faults, one.attempt
        lost: list[PastRun] = []
        while True:
            runs = self._attempt(block, attempt, first)
            last = runs[-1]
            if _is_complete(block, runs) or self._maker.stop.is_set():
                return runs, lost
            if last.wrong_code and last.arm is not None:
                self._wrong_code = True
                self._why_stop = (
                    f"arm {last.arm} is not the code that was prepared any more; run again"
                )
                return runs, lost
            faults += 1
            again = last.state in FAULTS and faults <= self._options.retries_of(block)
            if block.compares:
                lost_one = (block.cell.id, block.number, attempt, last.arm or "", last.state, again)
                self._maker.publish(BlockLost(*lost_one))
            if not again:
                self._give_up(block)
                return runs, lost
            lost += runs
            attempt += 1

    def _give_up(self, block: Block) -> None:
        """Count a block that failed for good; it ends the other blocks of its cell."""
        most = self._options.max_failures
        self._failures += 1
        if block.compares:
            self._given_up.add(block.cell.id)
        if most is not None and self._failures >= most:
            some = f"{self._failures} failed run{'s' if self._failures > 1 else ''}"
            self._why_stop = f"{some}, as many as --max-failures"

    def _attempt(self, block: Block, attempt: int, first: int) -> list[PastRun]:
        """The runs of one attempt; it ends with the first that fails or is stopped."""
        total = max(first + len(block.arms) - 1, self._total)
        runs: list[PastRun] = []
        for position, run in enumerate(block.runs, start=first):
            number = attempt if block.compares else None
            runs.append(self._maker.run(run, position, total, number))
            if runs[-1].state not in FINISHED_GOOD or self._maker.stop.is_set():
                break
        return runs


def _is_complete(block: Block, runs: Sequence[PastRun]) -> bool:
    return len(runs) == len(block.arms) and runs[-1].state in FINISHED_GOOD
