"""The real command line in processes of its own, in a folder of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import psutil

from bench.record import RunRecord
from bench.store import ResultsStore

CHECKOUT = Path(__file__).parents[2]


def wait_for(condition: Callable[[], bool], what: str, seconds: float = 150.0) -> None:
    """Poll until it holds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited {seconds} s for {what}"
        time.sleep(0.1)


class CommandLine:
    """`mfsdp-bench` in `folder`, with these `variables` beside those that are there."""

    def __init__(self, folder: Path, variables: Mapping[str, str] | None = None) -> None:
        self.folder = folder
        unwanted = {"NO_COLOR", "FORCE_COLOR", "COLUMNS"}
        kept = {name: value for name, value in os.environ.items() if name not in unwanted}
        self.environment = kept | {"PYTHONPATH": str(CHECKOUT), "TERM": "dumb"} | (variables or {})

    def command(self, *arguments: object) -> list[str]:
        return [sys.executable, "-m", "bench", *map(str, arguments)]

    def run(self, *arguments: object, **options: Any) -> subprocess.CompletedProcess[str]:
        """Run one command to its end."""
        return subprocess.run(
            self.command(*arguments),
            cwd=self.folder,
            env=self.environment | options.pop("env", {}),
            capture_output=True,
            text=True,
            check=False,
            timeout=options.pop("timeout", 200),
            **options,
        )

    def start(self, *arguments: object) -> subprocess.Popen[str]:
        """Start one command and leave it running."""
        return subprocess.Popen(
            self.command(*arguments),
            cwd=self.folder,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def sweep(self, text: str, name: str = "sweep.yaml") -> Path:
        """Write a sweep file."""
        path = self.folder / name
        path.write_text(text)
        return path

    @property
    def store(self) -> ResultsStore:
        return ResultsStore.open(self.folder / "results", create=True)

    def records(self) -> list[RunRecord]:
        """Oldest first."""
        return list(self.store.records())

    def runs(self) -> list[tuple[str, str]]:
        """(cell, state) of every record, oldest first."""
        return [(str(one.status.cell), one.status.state) for one in self.records()]

    def wait_for_steps(self, runs: int = 1) -> None:
        """Until so many runs have finished a step on every rank."""

        def stepping() -> bool:
            return sum(len(record.losses) > 0 for record in self.records()) >= runs

        wait_for(stepping, f"{runs} runs that step")

    def alive(self) -> list[psutil.Process]:
        """Processes that work for a run below this folder, in whatever session."""
        found = []
        for process in psutil.process_iter():
            try:
                words = process.environ() if process.pid != os.getpid() else {}
                alive = process.status() != psutil.STATUS_ZOMBIE
            except (psutil.Error, OSError):
                continue
            if alive and any(str(self.folder / "results") in value for value in words.values()):
                found.append(process)
        return found
