"""The command line on a login node of the test cluster, and what its jobs leave."""

from __future__ import annotations

import signal
import subprocess
import time
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
slurm: {{poll_seconds: 5, exclusive: false, options: {{{options}}}}}
"""


class Cluster(CommandLine):
    """A results folder, and the command line on a login node."""

    def __init__(self, slurm: TwoNodeSlurm, folder: Path) -> None:
        super().__init__(folder, slurm.environment | {"XDG_CONFIG_HOME": str(folder)})
        self.slurm = slurm

    def sweep_of(
        self, *, steps: int = 6, nodes: int = 2, engines: str = "mfsdp", options: str = ""
    ) -> Path:
        text = SWEEP.format(steps=steps, nodes=nodes, engines=engines, options=options)
        return self.sweep(text, "two.yaml")

    def states(self) -> list[str]:
        return [state for _, state in self.runs()]

    def wait_for(self, condition: Callable[[], bool], what: str, seconds: float = 150.0) -> None:
        self.slurm.wait_until(condition, what, seconds)

    def ready(self) -> None:
        """No job left, both nodes idle."""
        self.wait_for(lambda: not self.slurm.jobs(), "an empty queue")
        self.wait_for(lambda: self.slurm.node_states() == {"idle"}, "two idle nodes")


def end(process: subprocess.Popen[str], number: signal.Signals) -> tuple[int, str]:
    """Signal a command line; its exit code, and what it said last."""
    process.send_signal(number)
    _, err = process.communicate(timeout=200)
    time.sleep(0.1)
    return process.returncode, err
