"""Why a cell, a run or a block has no number: the one place that says so."""

from __future__ import annotations

from collections.abc import Sequence

from bench.derive.blocks import Block
from bench.plan import Plan
from bench.record import RunRecord
from reports.renderers import quantity
from reports.views.cells import Cell, Run

NOT_RUN = "it was planned and has not run"
_LOST = ("failed", "damaged")


def not_run(plan: Plan, cell: str, runs: set[tuple[int, str | None]], arms: Sequence[str]) -> str:
    """The first planned run of a cell that has no record among `runs`; empty if all have."""
    repeats = next((planned.repeats for planned in plan.cells if planned.id == cell), 0)
    for block in range(repeats):
        for arm in arms or (None,):
            if (block, arm) not in runs:
                name = f"block {block}: {arm}" if arm else f"repeat {block}"
                return f"{name}: {NOT_RUN}"
    return ""


def why_no_time(run: Run) -> str:
    """Why the run has no time, in words."""
    if run.kind == "damaged":
        return "; ".join(run.record.damage or run.record.problems)
    if run.kind == "unsteady":
        return "; ".join(note for note in run.summary.notes if note.startswith("no times")) or "-"
    return run.record.status.reason or quantity.MISSING


def why_not_finished(cell: Cell) -> str:
    """What became of the runs of a cell without a finished one."""
    return "; ".join(sorted({_ending(run) for run in cell.runs}))


def lost_repeat(cell: Cell) -> str:
    """The first repeat that ended with a failed run; empty if none did."""
    runs = [run for run in cell.runs if run.kind in _LOST] + [*cell.failed_since]
    return next((f"repeat {run.record.status.repeat}: {_ending(run)}" for run in runs), "")


def why_no_block(members: Sequence[RunRecord], base: str, head: str) -> str:
    """Why two arms have no complete block among the runs of a cell."""
    if not members:
        return NOT_RUN
    parts = []
    for arm in (base, head):
        runs = [record for record in members if record.status.arm == arm]
        bad = [r for r in runs if not r.is_whole]
        if not runs:
            parts.append(f"{arm} has not run")
        elif bad:
            parts.append(f"{arm}: {_ending(Run.of(bad[-1]))}")
    return "no complete block (" + ("; ".join(parts) or "the arms never finished together") + ")"


def lost_to_a_failure(members: Sequence[RunRecord], like: Block) -> str:
    """The first block that ends with a failed run of an arm of `like`; empty if none does.

    One that somebody interrupted is not there, and says nothing about the code.
    """
    configs = {arm: record.resolved.config_hash for arm, record in like.items()}
    last = {
        (record.status.repeat, str(record.status.arm)): Run.of(record)
        for record in members  # oldest first
        if configs.get(str(record.status.arm)) == record.resolved.config_hash
    }
    lost = ((key, run) for key, run in last.items() if run.kind in _LOST)
    return next((f"block {n}: {arm}: {_ending(run)}" for (n, arm), run in lost), "")


def _ending(run: Run) -> str:
    status = run.record.status
    if run.kind == "damaged":
        return f"damaged: {next(iter((*run.record.damage, *run.record.problems)))}"
    return f"{status.state}: {status.reason}".rstrip(": ")
