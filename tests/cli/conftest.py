"""The real command line in a process of its own, and small sweeps for it to run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from outcome_scenarios import TWO_CELLS
from stand_in_runs import ended

from bench.launch.arm import probe
from bench.launch.code import RankCode
from bench.record import RunStatus
from bench.store import ResultsStore, RunFolder

CHECKOUT = Path(__file__).parents[2]

# Twelve steps of the smallest model on one rank: what starts fastest.
FAST = """\
name: fast
base:
  model: {preset: debug}
  data: {kind: markov}
  train: {steps: 12, global_batch: 2, micro_batch: 1, seq_len: 16}
  launch: {ranks: 1, hang_seconds: 60.0, timeout_seconds: 120.0}
"""


class CommandLine:
    """`mfsdp-bench` in a folder of its own, from this checkout or from a copy."""

    def __init__(self, folder: Path, checkout: Path = CHECKOUT) -> None:
        self.folder = folder
        self.checkout = checkout

    @property
    def environment(self) -> dict[str, str]:
        unwanted = {"NO_COLOR", "FORCE_COLOR", "COLUMNS"}
        kept = {name: value for name, value in os.environ.items() if name not in unwanted}
        return kept | {"PYTHONPATH": str(self.checkout), "TERM": "dumb"}

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
            timeout=options.pop("timeout", 150),
            **options,
        )

    def start(self, *arguments: object) -> subprocess.Popen[str]:
        """Start one command and leave it running; its lines come through `stderr`."""
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

    def runs(self, sweep: str = "fast") -> list[tuple[str, str]]:
        """(cell, state) of every record of a sweep, oldest first."""

        store = ResultsStore.open(self.folder / "results", create=False)
        return [(str(r.status.cell), r.status.state) for r in store.records(sweep=sweep)]

    def ranks_alive(self) -> list[int]:
        """Processes that work for a run below this folder, in whatever session."""
        found = []
        for process in psutil.process_iter():
            try:
                words = process.environ() if process.pid != os.getpid() else {}
                alive = process.status() != psutil.STATUS_ZOMBIE
            except (psutil.Error, OSError):
                continue
            if alive and any(str(self.folder / "results") in value for value in words.values()):
                found.append(process.pid)
        return found


@pytest.fixture
def cli(tmp_path: Path) -> CommandLine:
    return CommandLine(tmp_path)


@pytest.fixture
def in_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """Runs a command in this process: (exit code, stdout, stderr). For commands that only read."""
    from bench.cli.main import run_command_line

    monkeypatch.chdir(tmp_path)

    def run(*arguments: object) -> tuple[int, str, str]:
        code = run_command_line([str(argument) for argument in arguments])
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return run


@pytest.fixture
def fast() -> str:
    """A sweep file whose one cell runs in seconds; append a matrix to it."""
    return FAST


class World:
    """An empty folder, the command line, and runs that end as a scenario wants."""

    def __init__(self, folder: Path, run: Callable[..., tuple[int, str, str]], cli: Any) -> None:
        self.folder = folder
        self.cli = cli
        self.states: dict[str, str] = {}
        self._run = run
        self.out = ""
        self.err = ""

    def run(self, *arguments: object) -> int:
        code, self.out, self.err = self._run(*arguments)
        return code

    def file(self, text: str) -> Path:
        path = self.folder / "sweep.yaml"
        path.write_text(text)
        return path

    @property
    def store(self) -> ResultsStore:
        return ResultsStore.open(self.folder / "results", create=True)

    def launch(self, resolved, folder, **_: object) -> RunStatus:
        """In the place of `bench.launch.run.launch`."""
        state = self.states.get(folder.status.cell, "ok")
        return self.finish(resolved, folder, state)

    def finish(self, resolved, folder: RunFolder, state: str) -> RunStatus:
        status = ended(resolved, folder, state, reason="as the test wants")
        for rank in range(resolved.launch.ranks):
            (folder.logs_path / f"rank{rank}.log").write_text(f"I am rank {rank}\n")
        return status

    def sweep(self, text: str = TWO_CELLS, **states: str) -> int:
        """Run a sweep whose cells end in `states`."""
        self.states = states
        return self.run("run", self.file(text))

    def run_folder(self, cell: str) -> Path:
        for record in self.store.records():
            if record.status.cell == cell:
                return self.store.root / "runs" / record.run_id
        raise AssertionError(f"no run of {cell}")


_ANSWERS: dict[str, dict[str, Any]] = {}
_ask = probe._ask


def _asked_once(code: RankCode, asked: dict[str, Any]) -> dict[str, Any]:
    """What an interpreter says of this checkout, which no test changes: a process less each time.

    `tests/run/test_launch_arm_preparation.py` asks anew.
    """
    if code.root != CHECKOUT or code.paths:
        return _ask(code, asked)
    key = json.dumps([code.python, asked | {"arm": ""}], default=str)
    if key not in _ANSWERS:
        _ANSWERS[key] = _ask(code, asked)
    return _ANSWERS[key]


@pytest.fixture
def world(tmp_path, in_process, cli, monkeypatch) -> World:
    made = World(tmp_path, in_process, cli)
    monkeypatch.setattr("bench.cli.chosen_sweep.launch", made.launch)
    monkeypatch.setattr(probe, "_ask", _asked_once)
    return made
