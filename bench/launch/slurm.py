"""`SlurmLauncher`: the runs of a sweep inside one allocation of Slurm, one after another.

`sbatch --nodes=2 --wrap 'exec mfsdp-bench run x.yaml --launcher slurm'` runs this process on the
first node. A run on one node is started there as on any machine; one on several by srun, with an
agent on each. Slurm ends a job by SIGTERM to all of it: the run that goes on is interrupted, and
the same command in the next allocation goes on with what is missing.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

from bench.errors import UsageError
from bench.launch.command import agent_command
from bench.launch.local.launcher import LocalJob
from bench.launch.protocol import JobState, Order, Symptoms
from bench.launch.rendezvous import Rendezvous

_SECONDS = 60.0


def allocated_nodes() -> int:
    """Nodes of the allocation that this process is in.

    Raises:
        UsageError: it is in none.
    """
    if "SLURM_JOB_ID" not in os.environ:
        raise UsageError(
            "--launcher slurm starts runs inside an allocation, and SLURM_JOB_ID is not set; submit"
            " the command: sbatch --nodes=2 --exclusive --wrap 'exec mfsdp-bench run SWEEP"
            " --launcher slurm'"
        )
    return int(os.environ.get("SLURM_JOB_NUM_NODES", "1"))


class SlurmLauncher:
    """Runs within the allocation of this job."""

    def start(self, order: Order) -> LocalJob:
        """Start the agents."""
        launch = order.resolved.launch
        # salloc leaves this process on the login node, which is no node of the job.
        if launch.nodes == 1 and "SLURMD_NODENAME" in os.environ:
            return LocalJob(order)
        return StepJob(order, self._nodes[: launch.nodes])

    @cached_property
    def _nodes(self) -> list[str]:
        """Names of the nodes of the allocation, in Slurm's order."""
        return _ask(["scontrol", "show", "hostnames", os.environ["SLURM_JOB_NODELIST"]]).split()


class StepJob(LocalJob):
    """A step of this job: srun, and an agent on every node."""

    def __init__(self, order: Order, nodes: list[str]) -> None:
        self._nodes = nodes
        cpus = os.environ.get("SLURM_CPUS_PER_TASK")
        command = [
            "srun",
            f"--nodes={len(nodes)}",
            f"--ntasks={len(nodes)}",
            f"--nodelist={','.join(nodes)}",
            "--ntasks-per-node=1",
            *([f"--cpus-per-task={cpus}"] if cpus else []),
            "--kill-on-bad-exit=1",
            "--unbuffered",
            *agent_command(order, parent=0),
        ]
        rendezvous = Rendezvous.at(_address_of(nodes[0]), len(nodes))
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
        with contextlib.suppress(UsageError):
            _ask(["scancel", "--quiet", f"--signal={number.name[3:]}", os.environ["SLURM_JOB_ID"]])


def _address_of(node: str) -> str:
    """Address of a node as Slurm uses it; its name where Slurm does not say."""
    with contextlib.suppress(UsageError):
        for word in _ask(["scontrol", "show", "node", "-o", node]).split():
            key, _, value = word.partition("=")
            if key == "NodeAddr" and value:
                return value
    return node


def _ask(command: Sequence[str]) -> str:
    """Output of a command of Slurm.

    Raises:
        UsageError: it is missing, or fails.
    """
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=True)
    except subprocess.CalledProcessError as error:
        said = error.stderr.strip() or f"exit code {error.returncode}"
        raise UsageError(f"{command[0]} fails: {said.splitlines()[-1]}") from None
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UsageError(f"Slurm does not answer: {error}; is this a node of a job?") from None
    return done.stdout
