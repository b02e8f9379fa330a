"""Making one run of a plan: its folder, its launch, its progress, its record."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from threading import Event

from bench.launch.code import RankCode
from bench.record import RunStatus
from bench.store.results_store import ResultsStore
from sweeps.blocks import PlannedRun
from sweeps.progress import RunEnded, RunStarted, StepReached, Subscriber
from sweeps.resume import CodeIdentity, PastRun, remembered

Launch = Callable[..., RunStatus]
"""`bench.launch.run.launch`: starts the ranks of a run and blocks until its record is written.

Called with the resolved run and its folder, `stop`, `on_step`.
"""


@dataclass(frozen=True)
class Side:
    """How the runs of one arm are started, what names their code, and the code of an arm."""

    launch: Launch
    code_identity: CodeIdentity
    code: RankCode | None = None


Sides = Mapping[str | None, Side]
"""By arm; None is the side of a sweep without arms."""


@dataclass(frozen=True)
class RunMaker:
    """Makes the runs of one sweep."""

    sweep: str
    store: ResultsStore
    sides: Sides
    stop: Event
    publish: Subscriber

    def code_of(self, run: PlannedRun) -> str:
        """Identity of the code that `run` measures."""
        return self.sides[run.arm].code_identity(run.cell.of(run.arm))

    def code_before(self) -> Callable[[PlannedRun], str]:
        """As `code_of`, asked once per engine and arm: for looking at what is there already.

        A run that starts is asked anew, as files may change while a sweep runs.
        """
        sides = {arm: remembered(side.code_identity) for arm, side in self.sides.items()}
        return lambda run: sides[run.arm](run.cell.of(run.arm))

    def run(
        self,
        run: PlannedRun,
        position: int,
        total: int,
        attempt: int | None = None,
    ) -> PastRun:
        """Run it, and say how it ended.

        Args:
            run: what to run.
            position: of `total`, for the progress.
            total: runs of this call.
            attempt: at the block of several arms that the run belongs to.

        Raises:
            NothingMeasuredError: the results folder cannot be written (a full disk).
        """
        cell, resolved, side = run.cell.id, run.cell.of(run.arm), self.sides[run.arm]
        folder = self.store.new_run(
            resolved,
            sweep=self.sweep,
            cell=cell,
            repeat=run.repeat,
            arm=run.arm,
            attempt=attempt,
            code=self.code_of(run),
        )

        def on_step(step: int) -> None:
            self.publish(StepReached(folder.run_id, step))

        with folder:
            self.publish(
                RunStarted(
                    cell,
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
            status = side.launch(resolved, folder, stop=self.stop, on_step=on_step)
        past = PastRun.of(folder.run_id, status)
        self.publish(RunEnded(past, position, total, time.monotonic() - begun))
        return past
