"""The command line, and runs that are stood in for."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command_line import CHECKOUT, CommandLine
from outcome_scenarios import TWO_CELLS
from stand_in_runs import ended, with_end, with_steps

from bench.launch import probe
from bench.launch.code import RankCode, code_identity
from bench.record import RunRecord, RunStatus
from bench.store import ResultsStore, RunFolder

# Twelve steps of the smallest model on one rank: what starts fastest.
FAST = """\
name: fast
base:
  model: {preset: debug}
  data: {kind: markov}
  train: {steps: 12, global_batch: 2, micro_batch: 1, seq_len: 16}
  launch: {ranks: 1, hang_seconds: 60.0, timeout_seconds: 120.0}
"""


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
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # tracebacks of internal errors

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
    """An empty folder, the command line, and runs that end as a scenario wants.

    states: how the runs of a cell end. milliseconds: per step, by arm and block. edited: code of an
    arm, or of all, where it is not what is here. as_json: commands are asked for JSON.
    """

    def __init__(
        self,
        folder: Path,
        run: Callable[..., tuple[int, str, str]],
        cli: CommandLine,
        patch: pytest.MonkeyPatch,
    ) -> None:
        self.folder = folder
        self.cli = cli
        self.patch = patch
        self.states: dict[str, str] = {}
        self.milliseconds: Callable[[str | None, int], float] | None = None
        self.edited: dict[str, str] = {}
        self.as_json = False
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
        return self.cli.store

    @property
    def records(self) -> list[RunRecord]:
        return self.cli.records()

    def launch(self, resolved, folder, **_: object) -> RunStatus:
        """In the place of `bench.launch.run.launch`."""
        if self.milliseconds is None:
            return self.finish(resolved, folder, self.states.get(folder.status.cell, "ok"))
        folder.write_environment({"cpu_name": "Example CPU", "cpu_count": 2})
        taken = self.milliseconds(folder.status.arm, folder.status.repeat)
        with_steps(resolved, folder, taken, 8)
        return with_end(folder)

    def finish(self, resolved, folder: RunFolder, state: str) -> RunStatus:
        status = ended(resolved, folder, state, reason="as the test wants")
        for rank in range(resolved.launch.ranks):
            (folder.logs_path / f"rank{rank}.log").write_text(f"I am rank {rank}\n")
        return status

    def code_identity(self, *asked: object, code: RankCode | None = None) -> str:
        """In the place of `bench.launch.code.code_identity`."""
        edited = self.edited.get("all") or self.edited.get(code.arm if code else "")
        return edited or code_identity(*asked, code=code)

    def sweep(self, text: str = TWO_CELLS, **states: str) -> int:
        """Run a sweep whose cells end in `states`."""
        self.states = states
        return self.run("run", self.file(text))

    def run_folder(self, cell: str) -> Path:
        for record in self.records:
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
    made = World(tmp_path, in_process, cli, monkeypatch)
    monkeypatch.setattr("sweeps.selected_sweep.launch", made.launch)
    monkeypatch.setattr("sweeps.selected_sweep.code_identity", made.code_identity)
    monkeypatch.setattr(probe, "_ask", _asked_once)
    return made
