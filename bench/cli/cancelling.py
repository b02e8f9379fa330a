"""`cancel`: the end of the jobs of a sweep."""

from __future__ import annotations

import time

from bench.cli import exit_codes
from bench.cli.answer import Answer
from bench.cli.verbs.measure import CancelRequest
from bench.errors import UsageError
from bench.launch.slurm.controller import ControllerSilentError
from bench.launch.slurm.queue import SlurmQueue
from bench.store import ResultsStore
from sweeps.jobs import read_arrays, see_jobs, settle

# Slurm itself gives processes 30 s (KillWait) between asking and killing.
_PATIENCE_SECONDS = 90.0
_LOOK_SECONDS = 5.0


def cancel_jobs(asked: CancelRequest) -> Answer:
    """Cancel, wait until no job is left, and settle the records.

    Raises:
        UsageError: the sweep has no jobs, or Slurm does not answer.
    """
    store, sweep = ResultsStore.open(asked.results, create=False), asked.sweep
    if not read_arrays(store, sweep):
        store.read_plan(sweep)  # says what is wrong with an unknown name
        raise UsageError(
            f"{sweep} was not run by jobs; a run on this machine is ended by Ctrl-C where it runs"
        )
    queue = SlurmQueue()
    try:
        seen = see_jobs(store, sweep, queue)
        ended = sorted(seen.alive)
        queue.cancel({job.partition("_")[0] for job in ended})
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while seen.alive and time.monotonic() < deadline:
            time.sleep(_LOOK_SECONDS)
            seen = see_jobs(store, sweep, queue)
    except ControllerSilentError as error:
        raise UsageError(f"the jobs of {sweep} cannot be ended now: {error}") from error
    settle(store, sweep, seen)
    left = sorted(seen.alive)
    return Answer(
        lambda: {"sweep": sweep, "cancelled": ended, "left": left},
        lambda: f"{sweep}: {len(ended)} jobs cancelled, {len(left)} still there",
        exit_codes.NOTHING_MEASURED if left else exit_codes.OK,
    )
