"""Runs blocks: the arms of a cell in turn, and all of them again if a fault costs one.

A run that failed is kept as a record, and so are the others of its block; none of them counts. A
block that fails for good ends its cell for this call: its other blocks would most likely fail too,
and every attempt costs a run of every arm.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from bench.record import FINISHED_GOOD, STOPPED
from sweeps.block_resume import FAULTS, MissingBlock
from sweeps.execution import RunMaker
from sweeps.interleave import PlannedBlock
from sweeps.progress import BlockLost, Remark, SweepStopped
from sweeps.resume import PastRun, PlannedRun
from sweeps.turns import possible_turns, run_in_turns


@dataclass
class BlocksRun:
    """What a call did.

    ended: runs of complete blocks, and the one that ended each failed block. lost: all other runs
    of blocks that were lost. started: number of blocks.
    """

    ended: list[PastRun] = field(default_factory=list)
    lost: list[PastRun] = field(default_factory=list)
    started: int = 0


Ended = Callable[[MissingBlock, Sequence[PastRun] | None], None]
"""Called with each block and the runs that count, None where it was given up."""


def run_blocks(
    maker: RunMaker,
    missing: Iterable[MissingBlock],
    *,
    total: int,
    retries: int,
    max_failures: int | None = None,
    ended: Ended = lambda *_: None,
    turns: int = 1,
) -> BlocksRun:
    """Run every block of `missing`, in order.

    Args:
        maker: makes single runs.
        missing: what to run; may be decided on while it runs.
        total: runs that this will probably be, for the progress.
        retries: how often a block that a fault cost is started again.
        max_failures: stop after so many blocks that failed for good.
        ended: told about every block that has ended.
        turns: that the arms of a block take, where they can (`sweeps.turns`).
    """
    runs = _Blocks(maker, retries, total, turns)
    failures = 0
    for one in missing:
        if maker.stop.is_set():
            maker.publish(SweepStopped("interrupted"))
            break
        if one.block.cell.id in runs.given_up:
            continue
        before = len(runs.result.ended)
        why_stop = runs.run_block(one)
        complete = one.block.cell.id not in runs.given_up and why_stop is None
        ended(one, runs.result.ended[before:] if complete else None)
        failures = len(runs.given_up)
        if why_stop is None and max_failures is not None and failures >= max_failures:
            why_stop = f"{failures} blocks failed, as many as --max-failures"
        if why_stop is not None:
            maker.publish(SweepStopped(why_stop))
            break
    return runs.result


class _Blocks:
    """The state of one call."""

    def __init__(self, maker: RunMaker, retries: int, total: int, turns: int) -> None:
        self._turns_asked = turns
        self._turns: dict[str, int] = {}
        self._maker = maker
        self._retries = retries
        self._total = total
        self._position = 0
        self.result = BlocksRun()
        self.given_up: set[str] = set()

    def run_block(self, missing: MissingBlock) -> str | None:
        """Run one block until it is complete or given up; why the sweep must stop, or None."""
        block = missing.block
        self.result.started += 1
        faults, attempt = missing.faults, missing.attempt
        while True:
            runs = self._attempt(missing, attempt)
            last = runs[-1]
            if last.state in FINISHED_GOOD and len(runs) == len(block.order):
                self.result.ended += runs
                self._position += len(block.order)
                return None
            if self._maker.stop.is_set():
                self._keep_lost(runs)
                return "interrupted"
            if last.wrong_code:
                self._keep_lost(runs)
                return f"arm {last.arm} is not the code that was prepared any more; run again"
            faults += 1
            again = last.state in FAULTS and faults <= self._retries
            if last.state == "out_of_memory" and self._turns_of(block) > 1:
                self._turns[block.cell.id] = 1
                self._maker.publish(
                    Remark(f"{block.cell.id}: no turns any more; its arms may fit one by one")
                )
                again = True
            self._maker.publish(
                BlockLost(block.cell.id, block.number, attempt, last.arm or "", last.state, again)
            )
            if not again:
                self._keep_lost(runs)
                self.given_up.add(block.cell.id)
                return None
            self.result.lost += runs
            attempt += 1

    def _attempt(self, missing: MissingBlock, attempt: int) -> list[PastRun]:
        """The runs of one attempt; it ends with the first that fails or is stopped."""
        block = missing.block
        turns = self._turns_of(block)
        if turns > 1:
            position = self._position + 1
            total = max(self._position + len(block.order), self._total)
            return run_in_turns(
                self._maker, block, attempt, turns=turns, position=position, total=total
            )
        runs: list[PastRun] = []
        for offset, arm in enumerate(block.order, start=1):
            planned = PlannedRun(block.cell, block.number, arm)
            position = self._position + offset
            total = max(position, self._total)
            runs.append(self._maker.run(planned, position, total, attempt))
            if runs[-1].state not in FINISHED_GOOD or self._maker.stop.is_set():
                break
        return runs

    def _turns_of(self, block: PlannedBlock) -> int:
        """Of its cell; said once where it is not what was asked for."""
        cell, sides = block.cell, self._maker.sides
        if cell.id not in self._turns:
            self._turns[cell.id], why = possible_turns(
                self._turns_asked,
                {arm: cell.of(arm) for arm in block.order},
                {arm: sides[arm].code for arm in block.order},
            )
            if why:
                self._maker.publish(Remark(f"{cell.id}: {why}"))
        return self._turns[cell.id]

    def _keep_lost(self, runs: list[PastRun]) -> None:
        """A block that stays incomplete: the run that failed is reported, its others are lost.

        A run that was stopped is reported where all were: then it is not a fault of its block.
        """
        stopped = [run for run in runs if run.state in STOPPED]
        failed = [run for run in runs if run.state not in FINISHED_GOOD | STOPPED] or stopped
        self.result.ended += failed
        self.result.lost += [run for run in runs if run not in failed]
        self._position += len(runs)
