"""What a job of a sweep runs: `python -m sweeps.job_program FILE`, on the first of its nodes.

Makes what is missing of its cell, run after run, on the same nodes: repeats, arms and blocks are
compared with each other. It looks at the records first, so a job that is started again goes on.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import FrameType

from bench.launch.code import code_identity
from bench.launch.run import launch
from bench.launch.slurm.controller import own_job, why_this_job_ends
from bench.launch.slurm.launcher import SlurmLauncher
from bench.launch.slurm.queue import QueuedJob
from bench.launch.slurm.settings import SlurmSettings
from bench.launch.watch import StopRequest
from bench.record import FINISHED_GOOD, RunOutline
from bench.store.results_store import ResultsStore
from sweeps.execution import RunMaker, Side
from sweeps.jobs import Codes, JobArray, JobsSeen, read_array, settle
from sweeps.progress import Progress, RunEnded, RunStarted
from sweeps.resume import PastRun, RunOptions, compare_with_records
from sweeps.runner import BlockRunner


def main(arguments: list[str]) -> int:
    """Exit code 0 if every run of this job has finished, else 1."""
    file = Path(arguments[0])
    store = ResultsStore.open(file.parents[3], create=False)
    array = read_array(file)
    sys.argv = list(array.argv) or sys.argv  # records say what was typed
    stop = StopRequest()
    _heed_slurm(stop)
    _settle_own_runs(store, array.plan.id)
    cell = array.cells[int(os.environ.get("SLURM_ARRAY_TASK_ID") or 0)]
    runs = make_cell(array, cell, store, stop)
    return 0 if all(run.state in FINISHED_GOOD for run in runs) and not stop.is_set() else 1


def _heed_slurm(stop: StopRequest) -> None:
    """SIGUSR1 comes before the time limit; SIGTERM with every other end that Slurm has in mind."""

    def on_signal(number: int, _frame: FrameType | None) -> None:
        if stop.is_set():
            return
        job = own_job()
        if number == signal.SIGUSR1:
            stop.state, stop.why = "timeout", f"the time limit of job {job} is near"
        else:
            found = why_this_job_ends()
            stop.state, stop.why = found or ("interrupted", f"job {job} got SIGTERM")
        stop.set()

    for number in (signal.SIGUSR1, signal.SIGTERM):
        signal.signal(number, on_signal)


def _settle_own_runs(store: ResultsStore, sweep: str) -> None:
    """A run of this job that is not over is of its last start: nothing of it lives."""
    if job := own_job():
        look = QueuedJob("ended", "", "", "interrupted", f"job {job} lost its first node")
        settle(store, sweep, JobsSeen((), {job: look}))


def make_cell(
    array: JobArray, cell: str, store: ResultsStore, stop: StopRequest
) -> Sequence[PastRun]:
    """What is missing of one cell; what came of it."""
    plan = array.plan.selected([cell])
    settings = SlurmSettings.model_validate(array.settings)
    maker = RunMaker(plan.id, store, _sides(array.codes, settings), stop, _say)
    options = RunOptions(block_retries=array.block_retries)
    counts = partial(_counts, array)
    records, _ = store.outlines(plan.id)
    found = compare_with_records(plan, records, maker.code_before(), options, counts)
    total = len(found.missing_runs)
    ended, _ = BlockRunner(maker, options, total).run(found.missing)
    return ended


def _sides(codes: Codes, settings: SlurmSettings) -> dict[str | None, Side]:
    launcher = SlurmLauncher(settings)
    return {
        arm or None: Side(
            partial(launch, code=code, launcher=launcher), partial(code_identity, code=code)
        )
        for arm, code in codes.items()
    }


def _counts(array: JobArray, record: RunOutline) -> bool:
    """With --force, what this array made; with --retry-failed, what has not failed before it."""
    status = record.status
    again = array.force or (array.retry_failed and status.state not in FINISHED_GOOD)
    return status.job in {*array.jobs, own_job()} or not again


def _say(event: Progress) -> None:
    """Into the output of the job."""
    if isinstance(event, RunStarted | RunEnded):
        sys.stderr.write(f"{event}\n")
        sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
