"""What the queue adds to the state of runs: those that wait, and those whose job is gone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from bench.cli import console
from bench.launch.slurm.controller import ControllerSilentError
from bench.launch.slurm.queue import SlurmQueue
from bench.launch.slurm.settings import SlurmSettings
from bench.store import ResultsStore
from sweeps.jobs import JobsSeen, read_arrays, see_jobs


@dataclass(frozen=True)
class RunLine:
    """The newest record of one planned run; `missing` has none.

    `current` is False where the code has changed since: `run` will repeat it. For an arm, since the
    plan was made, as its code is looked at only when it is prepared.
    """

    cell: str
    repeat: int
    state: str
    current: bool
    run_id: str
    reason: str
    arm: str | None = None
    job: str | None = None
    packed: bool = False


def with_jobs(store: ResultsStore, sweep: str, lines: Sequence[RunLine]) -> list[RunLine]:
    """`lines` with their jobs, as the queue sees them now; asked once, and only where it matters.

    Nothing is written: `run` and `cancel` settle what a job has left behind.
    """
    open_states = {"missing", "running", "interrupted", "preempted"}
    if all(line.state not in open_states for line in lines):
        return list(lines)
    if all(array.over for array in read_arrays(store, sweep)):
        return list(lines)
    try:
        seen = see_jobs(store, sweep, SlurmQueue(SlurmSettings()))
    except ControllerSilentError as error:
        console.note(f"warning: the jobs of {sweep} are not known: {error}")
        return list(lines)
    return [_with_job(line, seen) for line in lines]


def _with_job(line: RunLine, seen: JobsSeen) -> RunLine:
    if line.state == "running":
        look = seen.looks.get(line.job or "")
        if look is None or look.phase == "running":
            return line
        return replace(line, state=look.state, reason=look.detail or look.reason)
    waiting = seen.cells.get(line.cell)
    if waiting is None or line.state not in {"missing", "interrupted", "preempted"}:
        return line
    job, look = waiting[0], seen.looks[waiting[0]]
    if look.phase == "queued":
        return replace(line, state="queued", job=job, reason=look.reason)
    if line.state == "missing":
        return replace(line, job=job, reason="its job runs, on " + look.nodes)
    return line
