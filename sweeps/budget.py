"""Interleaved blocks one at a time, as many as a clock allows.

[Note: a budget looks at no number] Which cell is next, and when the sweep ends, depends on how many
blocks a cell has and on how long blocks take, never on what their runs measured. The length of a
block does not change when the labels of its two runs are flipped. So after the clock's stop the
sign flips of every block are as likely as before, and one permutation test of the blocks is exact.

The plan on disk grows with the blocks, so that it never asks for more than was run.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Mapping
from dataclasses import replace
from statistics import fmean
from time import monotonic
from typing import Any

from bench.plan import Plan
from bench.store.results_store import ResultsStore
from sweeps.resume import MissingBlock, Progressed

MOST_BLOCKS = 1000
"""Of one cell; nobody waits for so many."""


class BlockBudget:
    """The clock of a sweep; it starts with the first block that is requested."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._took: dict[str, list[float]] = {}
        self._given_up: set[str] = set()
        self._begun: float | None = None
        self._block_begun = 0.0

    @property
    def spent_seconds(self) -> float:
        """Since the first block was requested."""
        return 0.0 if self._begun is None else monotonic() - self._begun

    @property
    def block_seconds(self) -> dict[str, float]:
        """What a block of each cell took in this call."""
        return {cell: fmean(took) for cell, took in self._took.items()}

    @property
    def blocks(self) -> int:
        """That were completed."""
        return sum(map(len, self._took.values()))

    def next_cell(self, blocks: Mapping[str, int]) -> str | None:
        """The cell whose block comes next, `blocks` being there; None ends the sweep."""
        now = monotonic()
        self._begun = now if self._begun is None else self._begun
        self._block_begun = now
        wanted = {cell: count for cell, count in blocks.items() if cell not in self._given_up}
        return next_cell(wanted, self.block_seconds, self.seconds - (now - self._begun))

    def block_ended(self, cell: str, *, complete: bool) -> None:
        """Count a block; a cell whose block was lost for good gets no more."""
        if complete:
            self._took.setdefault(cell, []).append(monotonic() - self._block_begun)
        else:
            self._given_up.add(cell)

    def to_data(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "seconds": self.seconds,
            "spent_seconds": self.spent_seconds,
            "block_seconds": self.block_seconds,
            "blocks": {cell: len(took) for cell, took in self._took.items()},
        }


def next_cell(
    blocks: Mapping[str, int], block_seconds: Mapping[str, float], seconds_left: float
) -> str | None:
    """The cell with the fewest blocks whose next one fits into the time left; None if none does.

    block_seconds: a cell that is missing is assumed to take as long as the longest known.
    """
    usual = max(block_seconds.values(), default=0.0)
    fitting = [c for c in blocks if block_seconds.get(c, usual) <= seconds_left]
    return min(fitting, key=blocks.__getitem__, default=None)


def budgeted_blocks(
    budget: BlockBudget, plan: Plan, store: ResultsStore, known: Progressed
) -> Iterator[MissingBlock]:
    """The next block of each cell that the budget names.

    The plan on disk asks for it before it runs, and for one block at least of each cell.

    Args:
        budget: names the cells.
        plan: to be kept; its numbers of repeats are not looked at.
        store: the results folder.
        known: the blocks of the plan with `MOST_BLOCKS` of each cell, by what is known of them.
    """
    numbers = Counter({cell.id: 1 for cell in plan.cells})

    def keep(*blocks: tuple[str, int]) -> None:
        for cell, number in blocks:
            numbers[cell] = max(numbers[cell], number + 1)
        cells = tuple(replace(cell, repeats=numbers[cell.id]) for cell in plan.cells)
        store.write_plan(plan.id, replace(plan, cells=cells).to_document())

    waiting: dict[str, deque[MissingBlock]] = {}
    for missing in known.missing:
        waiting.setdefault(missing.block.cell.id, deque()).append(missing)
    keep(*((run.cell, run.repeat) for run in (*known.done, *known.failed)))
    while True:
        cell = budget.next_cell({c: MOST_BLOCKS - len(left) for c, left in waiting.items() if left})
        if cell is None:
            return
        missing = waiting[cell].popleft()
        keep((cell, missing.block.number))
        yield missing
