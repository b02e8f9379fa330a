"""`SlurmQueue`: the controller as a queue of job arrays."""

from __future__ import annotations

import contextlib
from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

from bench.launch.protocol import Phase
from bench.launch.slurm.controller import OUTCOMES, ControllerSilentError, ask, lost_nodes
from bench.launch.slurm.settings import SlurmSettings
from bench.launch.slurm.submission import MAX_ARRAY, JobRequest, submit_array
from bench.record import RunState

_WAITING: Final = frozenset({"PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT"})
_ALIVE: Final = frozenset({
    "RUNNING", "COMPLETING", "CONFIGURING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT",
    "RESIZING",
})  # fmt: skip


@dataclass(frozen=True)
class QueuedJob:
    """A job as its queue sees it.

    phase: also `ended` if the queue no longer knows it. reason: why it waits. state: of a run that
    the end of this job has cut off, with `detail` in words.
    """

    phase: Phase
    reason: str = ""
    nodes: str = ""
    state: RunState = "interrupted"
    detail: str = ""


class SlurmQueue:
    """Asks about all jobs at once, and no more often than its runner wants to know.

    Each method raises ControllerSilentError where Slurm does not answer. settings: of the jobs that
    are submitted.
    """

    most_at_once = MAX_ARRAY

    def __init__(self, settings: SlurmSettings | None = None) -> None:
        self._settings = settings or SlurmSettings()

    def submit(self, request: JobRequest, count: int) -> str:
        """Submit an array of `count` jobs; its id."""
        return submit_array(request, self._settings, count)

    def look(self, jobs: Collection[str]) -> dict[str, QueuedJob]:
        """How each of `jobs` (as 12_3) is, by one call; what Slurm no longer knows has ended."""
        if not jobs:
            return {}
        arrays = ",".join(sorted({job.partition("_")[0] for job in jobs}))
        # Asked for one job alone that it no longer knows, squeue fails; in a list it leaves it out.
        listed = ["-j", f"{arrays},{arrays}", "-o", "%i|%T|%r|%N"]
        lines = ask(["squeue", "-h", "-r", "-t", "all", *listed]).splitlines()
        found = {name: fields for name, *fields in (line.strip().split("|") for line in lines)}
        return {job: _judged(job, found.get(job)) for job in jobs}

    def find(self, name: str) -> str | None:
        """Id of the array of this name; None if the controller knows none."""
        found = ask(["squeue", "-h", "-t", "all", "-n", name, "-o", "%F"]).split()
        return found[0] if found else None

    def cancel(self, arrays: Collection[str]) -> None:
        """Ask for the end of whole arrays: of their runs, and of jobs that wait."""
        if arrays:
            # --quiet: a job may end by itself in between.
            ask(["scancel", "--quiet", *sorted(arrays)])


def _judged(job: str, fields: list[str] | None) -> QueuedJob:
    """Of state, reason and nodes, in Slurm's words; None: it knows no such job."""
    if fields is None:
        return QueuedJob("ended", detail=f"job {job} is gone, and wrote no end of this run")
    code, reason, nodes = (*fields, "", "", "")[:3]
    reason = "" if reason == "None" else reason
    if code in _WAITING:
        return QueuedJob("queued", reason or code.lower())
    if code in _ALIVE:
        return QueuedJob("running", nodes=nodes)
    state, how = OUTCOMES.get(code, ("interrupted", f"ended as {code}"))
    if code == "NODE_FAIL":
        # Known only as long as the node has not come back.
        with contextlib.suppress(ControllerSilentError):
            lost = lost_nodes(nodes)
            how = f"lost node {', '.join(lost)}" if lost else how
    where = f" (nodes {nodes})" if nodes else ""
    return QueuedJob("ended", reason, nodes, state, f"job {job} {how}{where}")
