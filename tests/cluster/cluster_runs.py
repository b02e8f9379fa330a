"""The command line on the login node of the test cluster, and what its jobs leave."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from command_line import CommandLine
from two_node_slurm import TwoNodeSlurm

ENDLESS = 1_000_000

SWEEP = """\
name: two
base:
  model: {{preset: debug}}
  data: {{kind: markov}}
  train: {{steps: {steps}, global_batch: 4, micro_batch: 1, seq_len: 16}}
  launch: {{ranks: 2, nodes: {nodes}, hang_seconds: 60.0, timeout_seconds: 600.0}}
matrix: {{product: {{engine.name: [{engines}]}}}}
"""


class Cluster(CommandLine):
    """A results folder, and the command line on a login node."""

    def __init__(self, slurm: TwoNodeSlurm, folder: Path) -> None:
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        super().__init__(folder, slurm.environment | {"PATH": path})
        self.slurm = slurm

    def sweep_of(self, *, steps: int = 6, nodes: int = 2, engines: str = "mfsdp") -> Path:
        return self.sweep(SWEEP.format(steps=steps, nodes=nodes, engines=engines), "two.yaml")

    def submit(self, sweep: Path, *options: str, nodes: int = 2) -> str:
        """The id of a job that runs the sweep in an allocation of so many nodes."""
        command = shlex.join(self.command("run", sweep, "--launcher", "slurm"))
        job = ("--parsable", f"--nodes={nodes}", "--ntasks-per-node=1", "--output=job.out")
        return self.slurm.command(
            "sbatch",
            *job,
            "--open-mode=append",
            f"--chdir={self.folder}",
            f"--export=ALL,PYTHONPATH={self.environment['PYTHONPATH']}",
            *options,
            f"--wrap=exec {command}",
        ).strip()

    def shell(self, command: str) -> subprocess.CompletedProcess[str]:
        """With `mfsdp-bench` on the PATH, as pages assume it."""
        return subprocess.run(
            ["sh", "-c", command],
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )

    def said(self) -> str:
        """What the jobs have printed."""
        file = self.folder / "job.out"
        return file.read_text() if file.exists() else ""

    def wait_for(self, condition: Callable[[], bool], what: str, seconds: float = 150.0) -> None:
        self.slurm.wait_until(condition, what, seconds)

    def ready(self) -> None:
        """No job left, both nodes idle."""
        self.wait_for(lambda: not self.slurm.jobs(), "an empty queue")
        self.wait_for(lambda: self.slurm.node_states() == {"idle"}, "two idle nodes")
