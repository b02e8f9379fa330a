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

    def next_cell(self) -> str | None:
        """Id of a cell of the plan; None ends the sweep."""

    def block_ended(self, cell: str, runs: Sequence[PastRun] | None) -> list[str]:
        """One more block of `cell` counts; None: it was lost for good, the cell is given up.

        Returns remarks on what it has decided.
        """


def chosen_blocks(
    chooser: Chooser, whole: Plan, store: ResultsStore, found: Progressed
) -> Iterator[MissingBlock]:
    """The next block of each cell that is chosen.

    The plan on disk asks for it before it runs, and for one block at least of each cell.

    Args:
        chooser: names the cells.
        whole: the plan to keep; its numbers of repeats are not looked at.
        store: the results folder.
        found: the blocks of the plan with `MOST_BLOCKS` of each cell, by what is known of them.
    """
    numbers = Counter({cell.id: 1 for cell in whole.cells})

    def keep(*blocks: tuple[str, int]) -> None:
        for cell, number in blocks:
            numbers[cell] = max(numbers[cell], number + 1)
        cells = tuple(replace(cell, repeats=numbers[cell.id]) for cell in whole.cells)
        store.write_plan(whole.id, replace(whole, cells=cells).to_document())

    waiting: dict[str, deque[MissingBlock]] = {}
    for one in found.missing:
        waiting.setdefault(one.block.cell.id, deque()).append(one)
    keep(*((run.cell, run.repeat) for run in (*found.done, *found.failed)))
    while (cell := chooser.next_cell()) is not None:
        one = waiting[cell].popleft()
        keep((cell, one.block.number))
        yield one
