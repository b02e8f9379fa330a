"""The blocks of a plan and their order. Pure.

A block is one cell, run once by each of its arms, one right after the other. Arms that are compared
are in one block; a run that is compared with nothing is a block of one arm. The order of arms
depends on the sweep, the cell and the number of the block alone: more repeats, a selection of cells
or a resumed sweep change nothing about the blocks that were drawn before.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from bench.plan import Plan, PlannedCell


@dataclass(frozen=True)
class PlannedRun:
    """One run that the plan asks for; `arm` None where the plan has no arms."""

    cell: PlannedCell
    repeat: int
    arm: str | None = None


@dataclass(frozen=True)
class Block:
    """The arms run `cell` one after another, in this order. `number` is their repeat."""

    cell: PlannedCell
    arms: tuple[str | None, ...]
    number: int

    @property
    def compares(self) -> bool:
        """Whether its runs count only together, as one attempt at the block."""
        return len(self.arms) > 1

    @property
    def runs(self) -> tuple[PlannedRun, ...]:
        """In their order."""
        return tuple(PlannedRun(self.cell, self.number, arm) for arm in self.arms)


def arm_order(arms: Sequence[str], *, sweep: str, cell: str, block: int) -> tuple[str, ...]:
    """The arms of one block in the order in which they run.

    First is drawn without replacement over as many blocks as there are arms: in each such group
    every arm is first once, in random order, so that n blocks never favour an arm by more than one
    start. The order behind the first is drawn freely.
    """
    group, index = divmod(block, len(arms))
    firsts = random.Random(f"{sweep}/{cell}/first/{group}").sample(list(arms), len(arms))
    first = firsts[index]
    others = [arm for arm in arms if arm != first]
    random.Random(f"{sweep}/{cell}/others/{block}").shuffle(others)
    return (first, *others)


def planned_blocks(plan: Plan) -> Iterator[Block]:
    """Every block of a plan, first blocks of all cells first.

    Of a plan that is not interleaved, the blocks of one run each: all of the first arm, then all of
    the next.

    Raises:
        ValueError: the plan is interleaved and has no arms.
    """
    names = [arm.name for arm in plan.arms]
    if not plan.interleaved:
        yield from (Block(r.cell, (r.arm,), r.repeat) for r in planned_runs(plan))
        return
    if not names:
        raise ValueError("blocks need a plan with arms")
    for number, cell in _repeats(plan):
        yield Block(cell, arm_order(names, sweep=plan.id, cell=cell.id, block=number), number)


def planned_runs(plan: Plan) -> Iterator[PlannedRun]:
    """Every run, arm by arm, first repeats first: repeats of a cell are spread over the sweep."""
    for arm in tuple(arm.name for arm in plan.arms) or (None,):
        yield from (PlannedRun(cell, number, arm) for number, cell in _repeats(plan))


def _repeats(plan: Plan) -> Iterator[tuple[int, PlannedCell]]:
    for number in range(max((cell.repeats for cell in plan.cells), default=0)):
        yield from ((number, cell) for cell in plan.cells if number < cell.repeats)
