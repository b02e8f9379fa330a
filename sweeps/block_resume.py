"""Which blocks of an interleaved plan are there already.

A block is done only as a whole: every arm finished, in one attempt, with today's configuration and
code. Otherwise all of it runs again, the arms that had finished included: they were measured at
another time than what they are to be compared with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from bench.record import FINISHED_GOOD, STOPPED, RunRecord
from sweeps.interleave import PlannedBlock, planned_blocks
from sweeps.plan import Plan
from sweeps.resume import UNFINISHED, PastRun, PlannedRun

# Anything else that fails (out of memory, NaN, unsupported) would fail again with the same code.
FAULTS = STOPPED | {"crashed", "timeout", "hang"}

Attempt = dict[str, RunRecord]
"""Arm -> its newest run in one attempt at a block."""


@dataclass(frozen=True)
class MissingBlock:
    """A block to run.

    attempt: the number of its next attempt, counting all that were ever started. faults: attempts
    that were lost with the code of today, and so count against the retries.
    """

    block: PlannedBlock
    attempt: int = 1
    faults: int = 0


@dataclass(frozen=True)
class BlocksProgressed:
    """The blocks of a plan; done and failed as runs, one of every arm, or the one that failed."""

    missing: tuple[MissingBlock, ...]
    done: tuple[PastRun, ...]
    failed: tuple[PastRun, ...]

    @property
    def missing_runs(self) -> tuple[PlannedRun, ...]:
        """Of the missing blocks, in their order."""
        return tuple(
            PlannedRun(one.block.cell, one.block.number, arm)
            for one in self.missing
            for arm in one.block.order
        )


def compare_blocks(
    plan: Plan,
    records: Iterable[RunRecord],
    code_of: Callable[[PlannedRun], str],
    *,
    retries: int,
    retry_failed: bool = False,
) -> BlocksProgressed:
    """Sort the blocks of `plan` by what `records` (oldest first, of this sweep) say.

    Args:
        plan: an interleaved plan.
        records: all runs of the sweep.
        code_of: names the code of a run today.
        retries: how often a block that a fault cost is started again.
        retry_failed: start failed blocks again too.
    """
    by_block = runs_by_block(records)
    missing: list[MissingBlock] = []
    done: list[PastRun] = []
    failed: list[PastRun] = []
    for block in planned_blocks(plan):
        found = runs_of_block(block, by_block)
        attempts = _attempts(block, found, code_of)
        complete = next((a for a in reversed(attempts) if is_complete(block, a)), None)
        if complete is not None:
            done += [_past(block, complete[arm]) for arm in block.order]
            continue
        lost = [run for attempt in attempts if (run := _failure(attempt)) is not None]
        started = attempts_started(block, by_block)
        is_final = lost and (lost[-1].status.state not in FAULTS or len(lost) > retries)
        if is_final and not retry_failed:
            failed.append(_past(block, lost[-1]))
        else:
            faults = 0 if retry_failed else len(lost)
            missing.append(MissingBlock(block, started + 1, faults))
    return BlocksProgressed(tuple(missing), tuple(done), tuple(failed))


RunsByBlock = dict[tuple[str, int], list[RunRecord]]
"""(configuration, number of the block) -> its runs, oldest first."""


def runs_by_block(records: Iterable[RunRecord]) -> RunsByBlock:
    """Runs of interleaved blocks among `records`."""
    found: RunsByBlock = {}
    for record in records:
        if record.status.attempt is not None:
            key = (record.resolved.config_hash, record.status.repeat)
            found.setdefault(key, []).append(record)
    return found


def runs_of_block(block: PlannedBlock, known: RunsByBlock) -> list[RunRecord]:
    """Runs that were made for `block`, of each arm's own configuration."""
    cell = block.cell
    runs = [run for one in cell.config_hashes for run in known.get((one, block.number), [])]
    if not cell.by_arm:
        return runs
    # Two cells may have one arm's run in common, so the configuration does not name the block.
    return [
        run
        for run in runs
        if run.status.cell == cell.id
        and run.resolved.config_hash == cell.of(run.status.arm).config_hash
    ]


def attempts_started(block: PlannedBlock, known: RunsByBlock) -> int:
    """The highest number of an attempt at `block` so far, under any configuration of its cell.

    Numbers are never used twice: runs of one attempt belong together, whatever arms they are of.
    """
    return max(
        (
            int(run.status.attempt or 0)
            for (config_hash, number), runs in known.items()
            for run in runs
            if number == block.number
            and (run.status.cell == block.cell.id or config_hash in block.cell.config_hashes)
        ),
        default=0,
    )


def is_complete(block: PlannedBlock, attempt: Attempt) -> bool:
    """Every arm of the block finished, and its record is whole."""
    return all(arm in attempt and attempt[arm].is_whole for arm in block.order)


def _attempts(
    block: PlannedBlock, found: Iterable[RunRecord], code_of: Callable[[PlannedRun], str]
) -> list[Attempt]:
    """The attempts at a block, oldest first, without runs of other code."""
    codes = {arm: code_of(PlannedRun(block.cell, block.number, arm)) for arm in block.order}
    attempts: dict[int, Attempt] = {}
    for record in found:
        status = record.status
        if status.arm is not None and codes.get(status.arm) == status.code:
            attempts.setdefault(int(status.attempt or 0), {})[status.arm] = record
    return [attempts[number] for number in sorted(attempts)]


def _failure(attempt: Attempt) -> RunRecord | None:
    """The run that cost an attempt; None if it was stopped, or measured other code by mistake."""
    for record in attempt.values():
        status = record.status
        if status.code_proof != "mismatch" and status.state not in {*FINISHED_GOOD, *UNFINISHED}:
            return record
    return None


def _past(block: PlannedBlock, record: RunRecord) -> PastRun:
    status = record.status
    return PastRun(
        block.cell.id, block.number, record.run_id, status.state, status.reason, status.arm
    )
