"""What Slurm says about this job and its nodes: one command, plain fields, no accounting."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from typing import Final

from bench.errors import BenchError
from bench.record import RunState

_SECONDS = 60.0
OUTCOMES: Final[Mapping[str, tuple[RunState, str]]] = {
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
        lost = lost_nodes(variables.get("SLURM_JOB_NODELIST", ""))
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
    if state in OUTCOMES:
        return OUTCOMES[state][0], f"job {job} {OUTCOMES[state][1]}"
    return "interrupted", f"job {job} was cancelled"


def lost_nodes(nodes: str) -> list[str]:
    """Those of `nodes` (in Slurm's notation) that are down or do not answer."""
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
