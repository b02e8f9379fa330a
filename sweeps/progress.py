"""What a running sweep publishes. A display or a log subscribes; nothing here prints."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from sweeps.resume import PastRun


@dataclass(frozen=True)
class SweepStarted:
    """The lock is held and the plan written. Counts are runs, not cells.

    to_run: None where that is decided on the way.
    again: why runs that have a record are run again, a line per reason.
    """

    sweep: str
    to_run: int | None
    done_before: int
    failed_before: int
    again: tuple[str, ...] = ()


@dataclass(frozen=True)
class RunStarted:
    """`position` of `total` counts from 1 over the runs that are still missing.

    folder: where its `ranks` ranks write; a display may look into it while the run goes on.
    """

    cell: str
    repeat: int
    position: int
    total: int
    steps: int
    run_id: str
    folder: Path
    ranks: int
    arm: str | None = None


@dataclass(frozen=True)
class StepReached:
    """The slowest rank of a run has finished `step` (1-based)."""

    run_id: str
    step: int


@dataclass(frozen=True)
class RunEnded:
    """A record was written, whatever its state; `position` and `total` as of `RunStarted`."""

    run: PastRun
    position: int
    total: int
    seconds: float


@dataclass(frozen=True)
class BlockLost:
    """A run of an interleaved block failed, so its other runs do not count either.

    `again`: the block is started once more; else it is given up, with the rest of its cell.
    """

    cell: str
    block: int
    attempt: int
    arm: str
    state: str
    again: bool


@dataclass(frozen=True)
class Remark:
    """A line for whoever watches: why a sweep stops, what is waited for.

    is_warning: it ends, or will end, before all is run.
    """

    text: str
    is_warning: bool = False


Progress = SweepStarted | RunStarted | StepReached | RunEnded | BlockLost | Remark
Subscriber = Callable[[Progress], None]
