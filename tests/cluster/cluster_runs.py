"""The command line on a login node of the test cluster, and what its jobs leave."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from two_node_slurm import TwoNodeSlurm

from bench.record import RunRecord
from bench.store import ResultsStore

ENDLESS = 1_000_000
CHECKOUT = Path(__file__).parents[2]

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


@dataclass
class Cluster:
    """A results folder, and the command line on a login node."""

    slurm: TwoNodeSlurm
    folder: Path

    def sweep(
        self, *, steps: int = 6, nodes: int = 2, engines: str = "mfsdp", options: str = ""
    ) -> Path:
        path = self.folder / "two.yaml"
        path.write_text(SWEEP.format(steps=steps, nodes=nodes, engines=engines, options=options))
        return path

    def start(self, *arguments: object) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "bench", *map(str, arguments)],
            cwd=self.folder,
            env=os.environ
            | self.slurm.environment
            | {"PYTHONPATH": str(CHECKOUT), "XDG_CONFIG_HOME": str(self.folder)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *arguments: object, seconds: float = 200.0) -> tuple[int, str, str]:
        """Exit code, stdout, stderr."""
        process = self.start(*arguments)
        try:
            out, err = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            raise AssertionError(f"{arguments}: {process.communicate()}") from None
        return process.returncode, out, err

    def records(self) -> list[RunRecord]:
        return list(self.store.records())

    @property
    def store(self) -> ResultsStore:
        return ResultsStore.open(self.folder / "results", create=True)

    def states(self) -> list[str]:
        return [record.status.state for record in self.records()]

    def wait_for(self, condition: Callable[[], bool], what: str, seconds: float = 150.0) -> None:
        self.slurm.wait_until(condition, what, seconds)

    def wait_for_steps(self, runs: int = 1) -> None:
        """Until so many runs have finished a step on every rank."""

        def stepping() -> bool:
            return sum(len(record.losses) > 0 for record in self.records()) >= runs

        self.wait_for(stepping, f"{runs} runs that step")

    def ready(self) -> None:
        """No job left, both nodes idle."""
        self.wait_for(lambda: not self.slurm.jobs(), "an empty queue")
        self.wait_for(lambda: self.slurm.node_states() == {"idle"}, "two idle nodes")


def end(process: subprocess.Popen[str], number: signal.Signals) -> tuple[int, str]:
    """Signal a command line; its exit code, and what it said last."""
    process.send_signal(number)
    _, err = process.communicate(timeout=30)
    time.sleep(0.1)
    return process.returncode, err
