"""Runs what is missing of a plan, block by block, and keeps a record of every run.

A failed run is a record and the sweep goes on. If a fault costs a block of several arms, all of
them run again, as they are compared with each other; where such a block fails for good, its cell is
over for this call: its other blocks would most likely fail too, and every attempt costs a run of
every arm. A set `stop` event ends the current runs and the sweep. What cannot be kept (a full disk)
ends the sweep: measuring on would be measuring nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from threading import Event

from bench.plan import Plan
from bench.record import FINISHED_GOOD, STOPPED, RunStatus
from bench.store.results_store import ResultsStore
from sweeps.blocks import Block, PlannedRun
from sweeps.budget import MOST_BLOCKS, BlockBudget, budgeted_blocks
from sweeps.progress import (
    BlockLost,
    Remark,
    RunEnded,
    RunStarted,
    StepReached,
    Subscriber,
    SweepStarted,
)
from sweeps.resume import (
    FAULTS,
    CodeIdentity,
    MissingBlock,
    PastRun,
    RunOptions,
    compare_with_records,
    remembered,
)


@dataclass(frozen=True)
class Side:
    """How the runs of one arm are started, and what names their code.

    launch: `bench.launch.run.launch`; starts the ranks of a run and blocks until its record is
    written. Called with the resolved run and its folder, `stop`, `on_step`.
    """

    launch: Callable[..., RunStatus]
    code_identity: CodeIdentity


Sides = Mapping[str | None, Side]
"""By arm; None is the side of a sweep without arms."""


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
    kept: Plan,
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
        kept: the plan to keep in the results folder, of which `plan` is a selection.
        stop: set it to end the current run and the sweep.
        publish: receives progress.
        budget: names the cell of every block, instead of the repeats of an interleaved plan.

    Raises:
        UsageError: another runner holds the folder.
        NothingMeasuredError: the results folder cannot be written (a full disk).
    """
    runner = _Runner(plan.id, store, sides, options, stop, publish, budget)
    with store.lock():
        if budget is None:
            store.write_plan(plan.id, kept.to_document())
        wanted = plan if budget is None else plan.with_repeats(MOST_BLOCKS)
        records, _ = store.outlines(plan.id)
        progress = compare_with_records(wanted, records, runner.code_before(), options)
        missing: Iterable[MissingBlock] = progress.missing
        expected: int | None = len(progress.missing_runs)
        again = progress.again
        if budget is not None:  # nobody knows how many blocks it will take
            missing, expected, again = budgeted_blocks(budget, kept, store, progress), None, ()
        publish(SweepStarted(plan.id, expected, len(progress.done), len(progress.failed), again))
        runner.total = expected or 0
        runner.run(missing)
        return SweepOutcome(
            ran=tuple(runner.ended),
            done_before=progress.done,
            failed_before=progress.failed,
            not_started=0 if budget else runner.total - runner.started,
            interrupted=stop.is_set(),
            lost=tuple(runner.lost),
        )


@dataclass
class _Runner:
    """Runs blocks, and counts what comes of them.

    total: runs that this will probably be, for the progress. started: runs of the blocks that were
    begun. ended: runs of complete blocks with the one that ended each failed block. lost: all
    other runs.
    """

    sweep: str
    store: ResultsStore
    sides: Sides
    options: RunOptions
    stop: Event
    publish: Subscriber
    budget: BlockBudget | None
    total: int = 0
    started: int = 0
    ended: list[PastRun] = field(default_factory=list)
    lost: list[PastRun] = field(default_factory=list)
    _given_up: set[str] = field(default_factory=set)
    _failures: int = 0
    _why_stop: str = ""
    _wrong_code: bool = False

    def code_before(self) -> Callable[[PlannedRun], str]:
        """Names the code of a run, by one question per engine and arm.

        A run that starts asks anew, as files may change while a sweep runs.
        """
        known = {arm: remembered(side.code_identity) for arm, side in self.sides.items()}
        return lambda run: known[run.arm](run.cell.of(run.arm))

    def run(self, missing: Iterable[MissingBlock]) -> None:
        """Run blocks in order, until there are no more or there is a reason to stop.

        missing: may be decided on while it runs.
        """
        for missing_block in missing:
            if missing_block.block.cell.id in self._given_up:
                continue
            if not self.stop.is_set():
                self._run_block(missing_block)
            if self.stop.is_set() or self._why_stop:
                break
        is_early = self._wrong_code or self.budget is not None or self.started < self.total
        if self.stop.is_set() or (self._why_stop and is_early):
            why = "interrupted" if self.stop.is_set() else self._why_stop
            self.publish(Remark(f"stopped: {why}", is_warning=True))

    def _run_block(self, missing_block: MissingBlock) -> None:
        """Run one block until it is complete or given up."""
        runs = self._last_attempt(missing_block)
        complete = _is_complete(missing_block.block, runs)
        if self.budget is not None:
            self.budget.block_ended(missing_block.block.cell.id, complete=complete)
        ended = runs
        if not complete:
            # A run that was stopped is reported where all were: then it is no fault of its block.
            failed = [run for run in runs if run.state not in FINISHED_GOOD | STOPPED]
            ended = failed or [run for run in runs if run.state in STOPPED]
        self.ended += ended
        self.lost += [run for run in runs if run not in ended]

    def _last_attempt(self, missing_block: MissingBlock) -> list[PastRun]:
        """The runs of the last attempt; those of the ones before are lost."""
        block, attempt, faults = missing_block.block, missing_block.attempt, missing_block.faults
        first, self.started = self.started + 1, self.started + len(block.arms)
        while True:
            runs = self._attempt(block, attempt, first)
            last = runs[-1]
            if _is_complete(block, runs) or self.stop.is_set():
                return runs
            if last.wrong_code and last.arm is not None:
                self._wrong_code = True
                self._why_stop = (
                    f"arm {last.arm} is not the code that was prepared any more; run again"
                )
                return runs
            faults += 1
            again = last.state in FAULTS and faults <= self.options.retries_of(block)
            if block.compares:
                lost = (block.cell.id, block.number, attempt, last.arm or "", last.state, again)
                self.publish(BlockLost(*lost))
            if not again:
                self._give_up(block)
                return runs
            self.lost += runs
            attempt += 1

    def _give_up(self, block: Block) -> None:
        """Count a block that failed for good; it ends the other blocks of its cell."""
        most = self.options.max_failures
        self._failures += 1
        if block.compares:
            self._given_up.add(block.cell.id)
        if most is not None and self._failures >= most:
            some = f"{self._failures} failed run{'s' if self._failures > 1 else ''}"
            self._why_stop = f"{some}, as many as --max-failures"

    def _attempt(self, block: Block, attempt: int, first: int) -> list[PastRun]:
        """The runs of one attempt; it ends with the first that fails or is stopped."""
        runs: list[PastRun] = []
        for position, run in enumerate(block.runs, start=first):
            total = max(first + len(block.arms) - 1, self.total)
            runs.append(self._run(run, position, total, attempt if block.compares else None))
            if runs[-1].state not in FINISHED_GOOD or self.stop.is_set():
                break
        return runs

    def _run(self, run: PlannedRun, position: int, total: int, attempt: int | None) -> PastRun:
        """Make one run, the `position`-th of `total`: its folder, launch, progress and record."""
        resolved, side = run.cell.of(run.arm), self.sides[run.arm]
        folder = self.store.new_run(
            resolved,
            sweep=self.sweep,
            cell=run.cell.id,
            repeat=run.repeat,
            arm=run.arm,
            attempt=attempt,
            code=side.code_identity(resolved),
        )
        with folder:
            self.publish(
                RunStarted(
                    run.cell.id,
                    run.repeat,
                    position,
                    total,
                    resolved.train.steps,
                    folder.run_id,
                    folder.path,
                    resolved.launch.ranks,
                    run.arm,
                )
            )
            begun = time.monotonic()
            status = side.launch(
                resolved,
                folder,
                stop=self.stop,
                on_step=lambda step: self.publish(StepReached(folder.run_id, step)),
            )
        past = PastRun.of(folder.run_id, status)
        self.publish(RunEnded(past, position, total, time.monotonic() - begun))
        return past


def _is_complete(block: Block, runs: Sequence[PastRun]) -> bool:
    return len(runs) == len(block.arms) and runs[-1].state in FINISHED_GOOD
