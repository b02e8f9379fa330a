"""`SlurmLauncher`: the runs of a job, on the nodes of its allocation.

One process of the job, on its first node, makes the runs one after another. A run on one node is
started as on any machine; one on several by srun, with an agent on each. Where a run ends badly,
Slurm is asked whether it was Slurm's doing.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from pathlib import Path

from bench.launch.command import agent_command, rank_environment
from bench.launch.local.launcher import AGENT_LOG, LocalJob
from bench.launch.local.process_tree import end_run, start_detached
from bench.launch.protocol import Job, JobState, Order, Symptoms
from bench.launch.rendezvous import Rendezvous
from bench.launch.slurm.controller import ControllerSilentError, ask, own_job, settled_reason
from bench.launch.slurm.settings import SlurmSettings
from bench.store.layout import LOGS


class SlurmLauncher:
    """Runs within the allocation of this job."""

    def __init__(self, settings: SlurmSettings) -> None:
        self._settings = settings
        self._nodes: list[str] | None = None

    @property
    def job(self) -> str | None:
        """As squeue shows it."""
        return own_job()

    def start(self, order: Order) -> Job:
        """Start the agents."""
        here = order.resolved.launch.nodes == 1 and self._settings.container_image is None
        return SlurmJob(LocalJob(order) if here else StepJob(order, self._settings, self.nodes()))

    def nodes(self) -> list[str]:
        """Names of the nodes of the allocation, in Slurm's order."""
        if self._nodes is None:
            names = ask(["scontrol", "show", "hostnames", os.environ["SLURM_JOB_NODELIST"]])
            self._nodes = names.split()
        return self._nodes


class SlurmJob:
    """The processes of one run; what Slurm did to them is part of how they ended."""

    def __init__(self, inner: Job) -> None:
        self._inner = inner
        self._end: JobState | None = None

    @property
    def id(self) -> str:
        """Of the process that starts the ranks."""
        return self._inner.id

    def wait(self, seconds: float) -> JobState:
        """As the processes are, and once they have failed, why."""
        if self._end is not None:
            return self._end
        found = self._inner.wait(seconds)
        if found.phase != "ended":
            return found
        if found.exit_code != 0 and (reason := settled_reason()) is not None:
            state, detail = reason
            found = JobState("ended", detail, found.exit_code, state, found.kernel_oom_kills)
        self._end = found
        return found

    def cancel(self, grace_seconds: float) -> None:
        """As `inner` does."""
        self._inner.cancel(grace_seconds)

    def symptoms(self) -> Symptoms:
        """As `inner` has them."""
        return self._inner.symptoms()

    def ask_for_stacks(self) -> None:
        """As `inner` does."""
        self._inner.ask_for_stacks()


class StepJob:
    """A step of this job: srun, and an agent on every node."""

    def __init__(self, order: Order, settings: SlurmSettings, nodes: list[str]) -> None:
        self._order = order
        self._nodes = nodes
        self._srun = self._start(settings)

    def _start(self, settings: SlurmSettings) -> subprocess.Popen[bytes]:
        order, launch = self._order, self._order.resolved.launch
        environment = rank_environment(
            order.resolved, order.run_dir, os.environ, order.code, order.worker_module
        )
        environment |= Rendezvous.at(_address_of(self._nodes[0]), launch.nodes).variables()
        command = agent_command(order.resolved, order.run_dir, order.code, parent=0)
        if settings.container_image is not None:
            command[0] = settings.container_python
        cpus = os.environ.get("SLURM_CPUS_PER_TASK")
        arguments = [
            "srun",
            f"--nodes={launch.nodes}",
            f"--ntasks={launch.nodes}",
            "--ntasks-per-node=1",
            *([f"--cpus-per-task={cpus}"] if cpus else []),
            "--kill-on-bad-exit=1",
            "--unbuffered",
            *settings.container_arguments,
            *command,
        ]
        return start_detached(arguments, order.run_dir / LOGS / AGENT_LOG, environment)

    @property
    def id(self) -> str:
        """Process id of srun."""
        return str(self._srun.pid)

    def wait(self, seconds: float) -> JobState:
        """Sleeps until srun has ended."""
        try:
            code = self._srun.wait(seconds)
        except subprocess.TimeoutExpired:
            return JobState("running")
        return JobState("ended", exit_code=code)

    def cancel(self, grace_seconds: float) -> None:
        """By srun's own hand, which reaches every node; then by the controller's."""
        if self._srun.poll() is None:
            self._srun.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._srun.wait(grace_seconds)
            if self._srun.poll() is None:
                self._signal_steps(signal.SIGKILL)
        end_run(self._srun, self._order.run_dir, grace_seconds)

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

    Of the first one, whose agent serves the rendezvous: whoever starts them (`salloc`) may be on a
    login node.
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
