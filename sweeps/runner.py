"""Runs what is missing of a plan, one run after another, and keeps a record of each.

A failed run is a record and the sweep goes on. A set `stop` event ends the current run and the
sweep. What cannot be kept (a full disk) ends the sweep: measuring on would be measuring nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from threading import Event
from typing import Protocol

from bench.record import FINISHED_GOOD, RunStatus
from bench.spec import ResolvedRun
from bench.store.results_store import ResultsStore
from bench.store.run_folder import RunFolder
from sweeps.plan import Plan
from sweeps.progress import (
    RunEnded,
    RunStarted,
    StepReached,
    Subscriber,
    SweepStarted,
    SweepStopped,
    ignore,
)
from sweeps.resume import (
    CodeIdentity,
    PastRun,
    PlannedRun,
    Progressed,
    compare_with_records,
    planned_runs,
)


class Launch(Protocol):
    """`bench.launch.launch`: starts the ranks of a run and blocks until its record is written."""

    def __call__(
        self,
        resolved: ResolvedRun,
        folder: RunFolder,
        *,
        stop: Event,
        on_step: Callable[[int], None] | None = None,
    ) -> RunStatus:
        """Run `resolved` in `folder`."""


@dataclass(frozen=True)
class RunOptions:
    """What to run again, and when to give up.

    force: every run, done or not. retry_failed: runs whose record says they failed.
    max_failures: stop after so many failed runs of this call; None never stops.
    """

    force: bool = False
    retry_failed: bool = False
    max_failures: int | None = None


@dataclass(frozen=True)
class SweepOutcome:
    """What a call of `run_plan` did. `ran` holds the new records, `before` the reused ones."""

    ran: tuple[PastRun, ...]
    done_before: tuple[PastRun, ...]
    failed_before: tuple[PastRun, ...]
    not_started: int
    interrupted: bool

    @property
    def failed(self) -> tuple[PastRun, ...]:
        """Failed runs, new and old."""
        new = tuple(run for run in self.ran if run.state not in FINISHED_GOOD)
        return new + self.failed_before

    @property
    def good(self) -> tuple[PastRun, ...]:
        """Runs that finished, new and old."""
        return tuple(run for run in self.ran if run.state in FINISHED_GOOD) + self.done_before


def run_plan(
    plan: Plan,
    store: ResultsStore,
    *,
    launch: Launch,
    code_identity: CodeIdentity,
    options: RunOptions | None = None,
    whole: Plan | None = None,
    stop: Event | None = None,
    publish: Subscriber = ignore,
) -> SweepOutcome:
    """Run what is missing of `plan`, holding the lock of the results folder.

    Args:
        plan: the cells to run.
        store: the results folder.
        launch: starts one run.
        code_identity: names the code that a run measures.
        options: what to repeat.
        whole: the plan to keep in the results folder where `plan` is a selection of it.
        stop: set it to end the current run and the sweep.
        publish: receives progress.

    Raises:
        UsageError: another runner holds the folder.
        NothingMeasuredError: the results folder cannot be written (a full disk).
    """
    stop = stop or Event()
    options = options or RunOptions()
    with store.lock():
        store.write_plan(plan.id, (whole or plan).to_document())
        found = _to_run(plan, store, code_identity, options)
        publish(SweepStarted(plan.id, len(found.missing), len(found.done), len(found.failed)))
        ran = _Runs(plan.id, store, launch, code_identity, stop, publish).run_all(
            found.missing, options.max_failures
        )
    return SweepOutcome(
        ran=tuple(ran),
        done_before=found.done,
        failed_before=found.failed,
        not_started=len(found.missing) - len(ran),
        interrupted=stop.is_set(),
    )


def _to_run(
    plan: Plan, store: ResultsStore, code_identity: CodeIdentity, options: RunOptions
) -> Progressed:
    if options.force:
        return Progressed(tuple(planned_runs(plan)), (), ())
    found = compare_with_records(plan, store.records(sweep=plan.id), code_identity)
    if not options.retry_failed:
        return found
    again = {(run.cell, run.repeat) for run in found.failed}
    again |= {(run.cell.id, run.repeat) for run in found.missing}
    missing = tuple(run for run in planned_runs(plan) if (run.cell.id, run.repeat) in again)
    return Progressed(missing, found.done, ())


@dataclass(frozen=True)
class _Runs:
    sweep: str
    store: ResultsStore
    launch: Launch
    code_identity: CodeIdentity
    stop: Event
    publish: Subscriber

    def run_all(self, runs: tuple[PlannedRun, ...], max_failures: int | None) -> list[PastRun]:
        ended: list[PastRun] = []
        failures = 0
        for position, run in enumerate(runs, start=1):
            if self.stop.is_set():
                self.publish(SweepStopped("interrupted"))
                break
            record = self._run(run, position, len(runs))
            ended.append(record)
            failures += record.state not in FINISHED_GOOD
            if max_failures is not None and failures >= max_failures and position < len(runs):
                self.publish(SweepStopped(f"{failures} runs failed, as many as --max-failures"))
                break
        return ended

    def _run(self, run: PlannedRun, position: int, total: int) -> PastRun:
        cell, resolved = run.cell.id, run.cell.resolved
        folder = self.store.new_run(
            resolved,
            sweep=self.sweep,
            cell=cell,
            repeat=run.repeat,
            arm=None,
            code=self.code_identity(resolved),
        )
        steps = resolved.train.steps

        def on_step(step: int) -> None:
            self.publish(StepReached(cell, step, steps))

        with folder:
            self.publish(RunStarted(cell, run.repeat, position, total, steps, folder.run_id))
            begun = time.monotonic()
            status = self.launch(resolved, folder, stop=self.stop, on_step=on_step)
        seconds = time.monotonic() - begun
        self.publish(
            RunEnded(
                cell,
                run.repeat,
                position,
                total,
                folder.run_id,
                status.state,
                status.reason,
                seconds,
            )
        )
        return PastRun(cell, run.repeat, folder.run_id, status.state, status.reason)
