"""Interleaved blocks one at a time, each of the cell that somebody else chooses.

What is measured next, and when it is enough, is decided by a function that is told every block that
has ended; statistics are not this package's business. The plan on disk grows with the blocks, so
that it never asks for more than was run.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Protocol

from bench.store.results_store import ResultsStore
from sweeps.plan import Plan
from sweeps.resume import MissingBlock, PastRun, Progressed

MOST_BLOCKS = 1000
"""Of one cell; nobody waits for so many."""


class Chooser(Protocol):
    """Decides which cell gets the next block."""

    @property
    def expected_blocks(self) -> int:
        """How many there will probably be, for the progress; 0 while nobody knows."""

    def next_cell(self) -> str | None:
        """Id of a cell of the plan; None ends the sweep."""

    def block_ended(self, cell: str, runs: Sequence[PastRun] | None) -> None:
        """One more block of `cell` counts; None: it was lost for good, the cell is given up."""


class GrowingPlan:
    """The plan that is kept while blocks are added to it.

    Args:
        whole: the plan to keep; its numbers of repeats are not looked at.
        store: the results folder.
        found: the blocks of `of_all_blocks`, by what is known of them.
    """

    def __init__(self, whole: Plan, store: ResultsStore, found: Progressed) -> None:
        self._whole = whole
        self._store = store
        self._numbers = Counter({cell.id: 0 for cell in whole.cells})
        for run in (*found.done, *found.failed):
            self._grow(run.cell, run.repeat)
        self._waiting: dict[str, deque[MissingBlock]] = {}
        for one in found.missing:
            self._waiting.setdefault(one.block.cell.id, deque()).append(one)
        self._keep()

    @staticmethod
    def of_all_blocks(plan: Plan) -> Plan:
        """`plan` with more blocks than anybody will add."""
        return plan.with_repeats(MOST_BLOCKS)

    def blocks_for(self, chooser: Chooser) -> Iterator[MissingBlock]:
        """The next block of each cell that is chosen, part of the plan before it runs."""
        while (cell := chooser.next_cell()) is not None:
            one = self._waiting[cell].popleft()
            self._grow(cell, one.block.number)
            self._keep()
            yield one

    def _grow(self, cell: str, number: int) -> None:
        self._numbers[cell] = max(self._numbers[cell], number + 1)

    def _keep(self) -> None:
        """Have the plan on disk ask for so many blocks of each cell, and for one at least."""
        whole, numbers = self._whole, self._numbers
        cells = tuple(replace(cell, repeats=max(1, numbers[cell.id])) for cell in whole.cells)
        self._store.write_plan(whole.id, replace(whole, cells=cells).to_document())
