"""Interleaved blocks one at a time, each of the cell that somebody else chooses.

What is measured next, and when it is enough, is decided by a function that is told every block that
has ended; statistics are not this package's business. The plan on disk grows with the blocks, so
that it never asks for more than was run.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Protocol

from bench.store.results_store import ResultsStore
from sweeps.block_resume import MissingBlock, compare_blocks
from sweeps.block_runner import run_blocks
from sweeps.execution import RunMaker
from sweeps.interleave import PlannedBlock
from sweeps.plan import Plan
from sweeps.progress import SweepStarted
from sweeps.resume import PastRun
from sweeps.runner import RunOptions, SweepOutcome, as_recorded

MOST_BLOCKS = 1000
"""Of one cell; nobody waits for so many."""


class Chooser(Protocol):
    """Decides which cell gets the next block."""

    def next_cell(self) -> str | None:
        """Id of a cell of the plan; None ends the sweep."""

    def block_ended(self, cell: str, runs: Sequence[PastRun] | None) -> None:
        """One more block of `cell` counts; None: it was lost for good, the cell is given up."""


def run_until_decided(
    plan: Plan,
    maker: RunMaker,
    chooser: Chooser,
    *,
    options: RunOptions,
    whole: Plan,
    expected_runs: int = 0,
) -> SweepOutcome:
    """Run blocks of an interleaved plan as `chooser` asks for them, holding the folder's lock.

    Args:
        plan: the cells; their numbers of repeats are not looked at.
        maker: makes its runs.
        chooser: asked after every block.
        options: as for `run_sides`; `force` is not for here.
        whole: the plan to keep, of which `plan` may be a selection.
        expected_runs: how many it will probably be, for the progress.

    Raises:
        UsageError: as `run_sides`.
        NothingMeasuredError: as `run_sides`.
    """
    store = maker.store
    with store.lock():
        plan, whole = as_recorded(plan, replace(whole, until_decided=True), store, options)
        found = compare_blocks(
            plan.with_repeats(MOST_BLOCKS),
            store.records(sweep=plan.id),
            maker.code_before(),
            retries=options.block_retries,
            retry_failed=options.retry_failed,
        )
        numbers = Counter({cell.id: 0 for cell in whole.cells})
        for run in (*found.done, *found.failed):
            numbers[run.cell] = max(numbers[run.cell], run.repeat + 1)
        _keep(store, whole, numbers)

        def keep(block: PlannedBlock) -> None:
            numbers[block.cell.id] = max(numbers[block.cell.id], block.number + 1)
            _keep(store, whole, numbers)

        maker.publish(SweepStarted(plan.id, None, len(found.done), len(found.failed)))
        ran = run_blocks(
            maker,
            _asked_for(chooser, found.missing, keep),
            total=expected_runs,
            retries=options.block_retries,
            max_failures=options.max_failures,
            ended=lambda one, runs: chooser.block_ended(one.block.cell.id, runs),
            turns=plan.turns,
        )
        return SweepOutcome(
            ran=tuple(ran.ended),
            done_before=found.done,
            failed_before=found.failed,
            not_started=0,
            interrupted=maker.stop.is_set(),
            lost=tuple(ran.lost),
        )


def _asked_for(
    chooser: Chooser, missing: Sequence[MissingBlock], keep: Callable[[PlannedBlock], None]
) -> Iterator[MissingBlock]:
    waiting: dict[str, deque[MissingBlock]] = {}
    for one in missing:
        waiting.setdefault(one.block.cell.id, deque()).append(one)
    while (cell := chooser.next_cell()) is not None:
        one = waiting[cell].popleft()
        keep(one.block)
        yield one


def _keep(store: ResultsStore, whole: Plan, numbers: Counter[str]) -> None:
    """Have the plan on disk ask for so many blocks of each cell, and for one at least."""
    cells = tuple(replace(cell, repeats=max(1, numbers[cell.id])) for cell in whole.cells)
    store.write_plan(whole.id, replace(whole, cells=cells).to_document())
