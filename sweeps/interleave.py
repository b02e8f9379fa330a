"""The order of interleaved runs: which blocks there are, and which arm comes first in each. Pure.

A block is one cell, run once by every arm, one arm right after the other. The order depends on the
seed, the cell and the number of the block alone: more repeats, a selection of cells or a resumed
sweep change nothing about the blocks that were drawn before.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from sweeps.plan import Plan, PlannedCell

MAX_SEED = 2**31 - 1


@dataclass(frozen=True)
class PlannedBlock:
    """One block: the arms of `order` run `cell` in turn. `number` is the repeat of its runs."""

    cell: PlannedCell
    number: int
    order: tuple[str, ...]


def arm_order(arms: Sequence[str], *, seed: int, cell: str, block: int) -> tuple[str, ...]:
    """The arms of one block in the order in which they run.

    First is drawn without replacement over as many blocks as there are arms: in each such group
    every arm is first once, in random order, so that n blocks never favour an arm by more than one
    start. The order behind the first is drawn freely.
    """
    group, index = divmod(block, len(arms))
    firsts = random.Random(f"{seed}/{cell}/first/{group}").sample(list(arms), len(arms))
    first = firsts[index]
    others = [arm for arm in arms if arm != first]
    random.Random(f"{seed}/{cell}/others/{block}").shuffle(others)
    return (first, *others)


def planned_blocks(plan: Plan) -> Iterator[PlannedBlock]:
    """Every block of an interleaved plan, first blocks of all cells first.

    Raises:
        ValueError: the plan has no arms or no seed.
    """
    if not plan.arms or plan.seed is None:
        raise ValueError("blocks need a plan with arms and a seed")
    names = [arm.name for arm in plan.arms]
    for number in range(max((cell.repeats for cell in plan.cells), default=0)):
        for cell in plan.cells:
            if number < cell.repeats:
                order = arm_order(names, seed=plan.seed, cell=cell.id, block=number)
                yield PlannedBlock(cell, number, order)


def draw_seed() -> int:
    """A seed for a sweep that was given none; it is recorded in the plan."""
    return random.SystemRandom().randint(0, MAX_SEED)
