"""What a launcher is: something that starts the processes of a run and knows how they are.

`bench.launch.run` takes a run from its folder to its final status with any launcher. Each launcher
finds, watches and ends processes in its own way: on one machine by a process tree and a lock that
the kernel frees (`bench.launch.local`), inside an allocation by a step of srun
(`bench.launch.slurm`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol, Self

from bench.launch.code import RankCode
from bench.record import RunState
from bench.spec import LaunchSpec, ResolvedRun


@dataclass(frozen=True)
class Order:
    """What is to be started. `run_dir` holds the spec; `worker_module` is what each rank runs."""

    resolved: ResolvedRun
    run_dir: Path
    code: RankCode
    worker_module: str


@dataclass(frozen=True)
class JobState:
    """How a job is.

    detail: how the launcher says that it ended. exit_code: of the agent (-N: signal N), once it has
    ended. state: the launcher's own verdict on the end (a time limit, a lost
    node), None where the ranks' own reports decide. kernel_oom_kills: processes that the kernel
    ended for lack of memory while the job ran.
    """

    phase: Literal["running", "ended"]
    detail: str = ""
    exit_code: int | None = None
    state: RunState | None = None
    kernel_oom_kills: int = 0


@dataclass(frozen=True)
class Symptoms:
    """What a launcher can see of a job whose ranks finish no steps.

    ranks: state of each rank's process, as `running`, `sleeping`, `stopped`. agent: the same of the
    process that starts them, "" where unknown. load: the machine's load, in words.
    """

    ranks: Mapping[int, str] = field(default_factory=dict)
    agent: str = ""
    load: str = ""

    @classmethod
    def elsewhere(cls, hosts: Sequence[str], launch: LaunchSpec) -> Self:
        """Of ranks on `hosts`, whose processes nobody sees here: where each of them is."""
        each = launch.ranks_per_node
        return cls({rank: f"on {hosts[rank // each]}" for rank in range(launch.ranks)})


class Job(Protocol):
    """The processes of one run."""

    def wait(self, seconds: float) -> JobState:
        """Block until the job has ended, at most `seconds`; how it is then."""

    def cancel(self, grace_seconds: float) -> None:
        """End every process, by force after `grace_seconds`; returns when all are gone.

        Also after the job has ended by itself: for what its ranks left behind.
        """

    def symptoms(self) -> Symptoms:
        """A look at the processes, for the reason of a hang."""

    def ask_for_stacks(self) -> None:
        """Have every rank that still can write its Python stacks into its log."""


class Launcher(Protocol):
    """Starts the processes of a run, on the nodes that this process has."""

    def start(self, order: Order) -> Job:
        """Start the processes of a run."""
