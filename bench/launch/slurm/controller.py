"""What Slurm says about jobs and nodes: one command, plain fields, no accounting needed."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from bench.errors import BenchError
from bench.launch.protocol import QueuedJob
from bench.record import RunState

_SECONDS = 60.0
_WAITING: Final = frozenset({"PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT"})
_ALIVE: Final = frozenset({
    "RUNNING", "COMPLETING", "CONFIGURING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT",
    "RESIZING",
})  # fmt: skip
_ENDINGS: Final[Mapping[str, tuple[RunState, str]]] = {
    "CANCELLED": ("interrupted", "was cancelled"),
    "TIMEOUT": ("timeout", "reached its time limit"),
    "DEADLINE": ("timeout", "reached its deadline"),
    "PREEMPTED": ("preempted", "was preempted"),
    "NODE_FAIL": ("interrupted", "lost a node"),
    "BOOT_FAIL": ("interrupted", "lost a node, which did not boot"),
    "OUT_OF_MEMORY": ("out_of_memory", "was ended for lack of memory"),
}


class ControllerSilentError(BenchError):
    """Slurm does not answer: it is down, restarting, or not on this machine."""


@dataclass(frozen=True)
class JobLook:
    """Job, state and reason in Slurm's words, and its nodes in Slurm's notation."""

    state: str
    reason: str = ""
    nodes: str = ""


def ask(command: Sequence[str]) -> str:
    """Output of a command of Slurm.

    Raises:
        ControllerSilentError: it is missing, or fails.
    """
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_SECONDS, check=False
        )
    except FileNotFoundError:
        raise ControllerSilentError(
            f"{command[0]} is not installed here: run this on a login node of the cluster"
        ) from None
    except subprocess.TimeoutExpired:
        raise ControllerSilentError(f"{command[0]} has not answered in {_SECONDS:g} s") from None
    if done.returncode != 0:
        said = (done.stderr.strip() or done.stdout.strip()).splitlines()
        raise ControllerSilentError(
            f"{command[0]} fails ({done.returncode}): {said[-1] if said else 'no message'}"
        )
    return done.stdout


def look_at(jobs: Collection[str]) -> dict[str, QueuedJob]:
    """Each of `jobs` (as 12_3), by one call; what Slurm knows no more has ended.

    Raises:
        ControllerSilentError: Slurm does not answer.
    """
    if not jobs:
        return {}
    arrays = ",".join(sorted({job.partition("_")[0] for job in jobs}))
    # Asked for one job alone that it knows no more, squeue fails; in a list it leaves it out.
    command = ["squeue", "-h", "-r", "-t", "all", "-j", f"{arrays},{arrays}", "-o", "%i|%T|%r|%N"]
    found: dict[str, JobLook] = {}
    for line in ask(command).splitlines():
        name, state, reason, nodes = (*line.strip().split("|"), "", "", "")[:4]
        found[name] = JobLook(state, "" if reason == "None" else reason, nodes)
    return {job: _judged(job, found.get(job)) for job in jobs}


def _judged(job: str, look: JobLook | None) -> QueuedJob:
    if look is None:
        return QueuedJob("ended", detail=f"job {job} is gone, and wrote no end of this run")
    if look.state in _WAITING:
        return QueuedJob("queued", look.reason or look.state.lower())
    if look.state in _ALIVE:
        return QueuedJob("running", nodes=look.nodes)
    state, how = _ENDINGS.get(look.state, ("interrupted", f"ended as {look.state}"))
    if look.state == "NODE_FAIL":
        # Known only as long as the node has not come back.
        with contextlib.suppress(ControllerSilentError):
            lost = _lost_nodes(look.nodes)
            how = f"lost node {', '.join(lost)}" if lost else how
    where = f" (nodes {look.nodes})" if look.nodes else ""
    return QueuedJob("ended", look.reason, look.nodes, state, f"job {job} {how}{where}")


def cancel(jobs: Collection[str]) -> None:
    """Ask for the end of `jobs`, of their runs and of those that wait.

    Raises:
        ControllerSilentError: Slurm does not answer.
    """
    if jobs:
        # --quiet: a job may end by itself in between.
        ask(["scancel", "--quiet", *sorted(jobs)])


def own_job(variables: Mapping[str, str] = os.environ) -> str | None:
    """The job that this process is part of, as 12_3 or 12."""
    array, task = variables.get("SLURM_ARRAY_JOB_ID"), variables.get("SLURM_ARRAY_TASK_ID")
    return f"{array}_{task}" if array and task else variables.get("SLURM_JOB_ID")


def why_this_job_ends(variables: Mapping[str, str] = os.environ) -> tuple[RunState, str] | None:
    """What Slurm has in mind with the job of this process; None if it is to go on.

    Slurm sends the same signal for everything. A job that it takes the nodes from, to start it
    again, counts one more restart than the process was told of.
    """
    job = own_job(variables)
    number = variables.get("SLURM_JOB_ID", "")
    try:
        words = ask(["scontrol", "show", "job", "-o", number]).split()
        fields = dict(word.partition("=")[::2] for word in words)
        lost = _lost_nodes(variables.get("SLURM_JOB_NODELIST", ""))
    except ControllerSilentError as error:
        return "interrupted", f"job {job} was told to end; {error}"
    again = int(fields.get("Restarts", "0")) > int(variables.get("SLURM_RESTART_COUNT") or "0")
    state = fields.get("JobState", "")
    if state == "RUNNING" and not again:
        return None
    then = ", and will be started again" if again else ""
    if lost:
        return "interrupted", f"job {job} lost node {', '.join(lost)}{then}"
    if again or fields.get("PreemptTime", "None") not in {"None", "N/A"}:
        how = "requeued, for a job that goes first or by an operator" if again else "preempted"
        return "preempted", f"job {job} was {how}{then}"
    if state in _ENDINGS:
        return _ENDINGS[state][0], f"job {job} {_ENDINGS[state][1]}"
    return "interrupted", f"job {job} was cancelled"


def _lost_nodes(nodes: str) -> list[str]:
    if not nodes:
        return []
    lines = ask(["sinfo", "-h", "-N", "-n", nodes, "-o", "%N %t"]).splitlines()
    states = dict(line.split()[:2] for line in lines if len(line.split()) > 1)
    # An asterisk: the node does not answer.
    return sorted(
        name
        for name, state in states.items()
        if state.endswith("*") or state.startswith(("down", "fail"))
    )


def settled_reason(seconds: float = 5.0) -> tuple[RunState, str] | None:
    """As `why_this_job_ends`, asked again for a while: ranks may notice before Slurm says so."""
    deadline = time.monotonic() + seconds
    while True:
        found = why_this_job_ends()
        if found is not None or time.monotonic() > deadline:
            return found
        time.sleep(1.0)
