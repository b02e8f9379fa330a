"""`SlurmLauncher`: the runs of a job, on the nodes of its allocation.

One process of the job, on its first node, makes the runs one after another. A run on one node is
started as on any machine; one on several by srun, with an agent on each. If a run fails, Slurm is
asked whether it ended the run.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from dataclasses import replace
from functools import cached_property
from pathlib import Path

from bench.launch.command import agent_command
from bench.launch.local.launcher import LocalJob
from bench.launch.protocol import Job, JobState, Order, Symptoms
from bench.launch.rendezvous import Rendezvous
from bench.launch.slurm.controller import ControllerSilentError, ask, own_job, settled_reason
from bench.launch.slurm.settings import SlurmSettings


class SlurmLauncher:
    """Runs within the allocation of this job."""

    def __init__(self, settings: SlurmSettings) -> None:
        self._settings = settings

    @property
    def job(self) -> str | None:
        """As squeue shows it."""
        return own_job()

    def start(self, order: Order) -> Job:
        """Start the agents."""
        here = order.resolved.launch.nodes == 1 and self._settings.container_image is None
        return SlurmJob(order) if here else StepJob(order, self._settings, self._nodes)

    @cached_property
    def _nodes(self) -> list[str]:
        """Names of the nodes of the allocation, in Slurm's order."""
        return ask(["scontrol", "show", "hostnames", os.environ["SLURM_JOB_NODELIST"]]).split()


class SlurmJob(LocalJob):
    """The agent of a run on one node, started here; Slurm is asked why it failed."""

    _end: JobState | None = None

    def wait(self, seconds: float) -> JobState:
        """As the processes are, and once they have failed, why."""
        if self._end is not None:
            return self._end
        found = super().wait(seconds)
        if found.phase != "ended":
            return found
        if found.exit_code != 0 and (reason := settled_reason()) is not None:
            state, detail = reason
            found = replace(found, state=state, detail=detail)
        self._end = found
        return found


class StepJob(SlurmJob):
    """A step of this job: srun, and an agent on every node."""

    def __init__(self, order: Order, settings: SlurmSettings, nodes: list[str]) -> None:
        self._nodes = nodes
        launch = order.resolved.launch
        agent = agent_command(order, parent=0)
        if settings.container_image is not None:
            agent[0] = settings.container_python
        cpus = os.environ.get("SLURM_CPUS_PER_TASK")
        command = [
            "srun",
            f"--nodes={launch.nodes}",
            f"--ntasks={launch.nodes}",
            "--ntasks-per-node=1",
            *([f"--cpus-per-task={cpus}"] if cpus else []),
            "--kill-on-bad-exit=1",
            "--unbuffered",
            *settings.container_arguments,
            *agent,
        ]
        rendezvous = Rendezvous.at(_address_of(nodes[0]), launch.nodes)
        super().__init__(order, rendezvous.variables(), command)

    def wait(self, seconds: float) -> JobState:
        """Without kills by this node's kernel, which may have hit another run."""
        return replace(super().wait(seconds), kernel_oom_kills=0)

    def cancel(self, grace_seconds: float) -> None:
        """By srun, which reaches every node; then by the controller."""
        if self._agent.poll() is None:
            self._agent.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._agent.wait(grace_seconds)
            if self._agent.poll() is None:
                self._signal_steps(signal.SIGKILL)
        super().cancel(grace_seconds)

    def symptoms(self) -> Symptoms:
        """Where each rank is: nobody here sees the processes of other nodes."""
        return Symptoms.elsewhere(self._nodes, self._order.resolved.launch)

    def ask_for_stacks(self) -> None:
        """By the agents, which pass the request on."""
        self._signal_steps(signal.SIGUSR1)

    @staticmethod
    def _signal_steps(number: signal.Signals) -> None:
        """To every step of this job, and not to its batch script."""
        with contextlib.suppress(ControllerSilentError):
            ask(["scancel", "--quiet", f"--signal={number.name[3:]}", os.environ["SLURM_JOB_ID"]])


def _address_of(node: str) -> str:
    """Address of a node as Slurm uses it; its name where Slurm does not say.

    The first agent serves the rendezvous; this process may be on a login node (`salloc`).
    """
    with contextlib.suppress(ControllerSilentError):
        for word in ask(["scontrol", "show", "node", "-o", node]).split():
            key, _, value = word.partition("=")
            if key == "NodeAddr" and value:
                return value
    return node


def prints_of_job(folder: Path, job: str) -> Path:
    """File that holds what the process of a job printed."""
    return folder / f"{job}_0_log.out"
