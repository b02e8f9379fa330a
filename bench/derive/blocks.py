"""Blocks: the runs of one cell that belong together, one of every arm, made one after another.

A comparison pairs the arms block by block, so a block counts only as a whole: where one arm is
missing or has failed, the others of that block are left out too. Everything needed is in the
records themselves; no plan is read.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from bench.record import RunRecord

Block = dict[str, RunRecord]
"""Arm -> its run."""


def complete_blocks(
    records: Iterable[RunRecord], arms: Sequence[str] | None = None
) -> dict[str, list[Block]]:
    """Cell -> its complete blocks, in the order of their numbers (`status.repeat`).

    A block is complete if every arm has a run in it that finished (`ok` or `unstable`) and whose
    record is whole. Of an interleaved block that was started several times, the newest complete
    attempt counts; runs of different attempts are never put together. Blocks of an older
    configuration or of older code than the newest complete block of the cell are left out: they
    measured something else. A cell without a complete block has an empty list.

    Args:
        records: runs of one sweep, in any order; those without an arm are ignored.
        arms: the arms that a block needs; None is every arm that the cell has a record of.
    """
    by_cell: dict[str, list[RunRecord]] = {}
    for record in sorted(records, key=_age):
        status = record.status
        if status.arm is not None and (arms is None or status.arm in arms):
            by_cell.setdefault(status.cell or record.resolved.slug, []).append(record)
    return {cell: _blocks(members, arms) for cell, members in by_cell.items()}


def is_interleaved(block: Mapping[str, RunRecord]) -> bool:
    """Whether the runs of a block alternate, as one attempt at the block."""
    attempts = {record.status.attempt for record in block.values()}
    return len(attempts) == 1 and None not in attempts


def _blocks(members: Sequence[RunRecord], arms: Sequence[str] | None) -> list[Block]:
    """Complete blocks of one cell, `members` being its runs, oldest first."""
    wanted = set(arms) if arms is not None else {str(record.status.arm) for record in members}
    attempts: dict[tuple[str, int, int | None], list[Block]] = {}
    for record in members:
        if record.is_whole:
            _put(record, attempts)
    blocks_of_cell = [block for blocks in attempts.values() for block in blocks]
    complete = [block for block in blocks_of_cell if set(block) == wanted]
    if not complete:
        return []
    complete.sort(key=lambda block: max(map(_age, block.values())))
    current = _measured(complete[-1])
    # Later attempts come later in the list and replace earlier ones of the same number.
    current_blocks = (block for block in complete if _measured(block) == current)
    by_number = {next(iter(block.values())).status.repeat: block for block in current_blocks}
    return [by_number[number] for number in sorted(by_number)]


def _put(record: RunRecord, attempts: dict[tuple[str, int, int | None], list[Block]]) -> None:
    """Add a run, younger than all before it, to the block it belongs to.

    Arms may differ in their settings, so only runs made one by one differ by configuration;
    within an attempt an arm that runs again begins a block of its own.
    """
    status = record.status
    config = record.resolved.config_hash if status.attempt is None else ""
    blocks = attempts.setdefault((config, status.repeat, status.attempt), [])
    arm = str(status.arm)
    if not blocks or (status.attempt is not None and arm in blocks[-1]):
        blocks.append({})
    blocks[-1][arm] = record


def _measured(block: Block) -> tuple[bool, dict[str, tuple[str, str]]]:
    """What a block is about: how it was run, and the configuration and code of every arm."""
    identities = {arm: (r.resolved.config_hash, r.status.code) for arm, r in block.items()}
    return is_interleaved(block), identities


def _age(record: RunRecord) -> str:
    """Sorts by the time stamp of the run id, which is later than that of every run before it."""
    return record.run_id.rpartition("/")[2]
