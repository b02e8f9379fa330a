"""Real process trees with scripted ranks: agent, torchrun and signals are the real ones."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from bench.launch import Limits, launch
from bench.record import RunRecord, RunStatus
from bench.resolve.resolution import resolve_anywhere
from bench.spec import LaunchSpec, ResolvedRun, RunSpec, TrainSpec
from bench.store import ResultsStore

WORKERS = Path(__file__).parent / "workers"
ENDLESS = 100_000


def alive(pid: int) -> bool:
    """False also for a zombie: nobody may be there to reap an orphan of a killed parent."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@dataclass
class Scripted:
    """One run of scripted ranks; `run` blocks until it is over."""

    store: ResultsStore
    resolved: ResolvedRun

    def run(
        self,
        *,
        stop: threading.Event | None = None,
        on_step: Callable[[int], None] | None = None,
        limits: Limits | None = None,
    ) -> RunStatus:
        self.folder = self.store.new_run(
            self.resolved, sweep="s", cell="c", repeat=0, arm=None, code="x"
        )
        status = launch(
            self.resolved,
            self.folder,
            stop=stop or threading.Event(),
            on_step=on_step,
            worker_module="scripted_worker",
            limits=limits or Limits(tick_seconds=0.1, grace_seconds=1.0),
        )
        assert not self.survivors(), "the launcher returned before every process was gone"
        assert self.record().status == status, "the status returned is not the one on disk"
        return status

    def pid(self, name: str) -> int:
        """Process id in `pid.<name>`, waiting until it is there."""
        file = self.folder.path / f"pid.{name}"
        deadline = time.monotonic() + 20
        while not (file.exists() and file.read_text()):
            assert time.monotonic() < deadline, f"{name} never started"
            time.sleep(0.02)
        return int(file.read_text())

    def survivors(self) -> list[str]:
        files = self.folder.path.glob("pid.*")
        return [file.name for file in files if alive(int(file.read_text()))]

    def record(self) -> RunRecord:
        return self.store.read(self.folder.run_id)

    def log(self, name: str) -> str:
        return (self.folder.logs_path / name).read_text()


@pytest.fixture
def store(tmp_path: Path) -> ResultsStore:
    return ResultsStore.open(tmp_path / "results", create=True)


@pytest.fixture
def scripted(
    store: ResultsStore, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Scripted]]:
    """Make a run: `scripted({1: (3, "hang")}, steps=20, hang_seconds=2)`."""
    monkeypatch.setenv("PYTHONPATH", str(WORKERS))
    made: list[Scripted] = []

    def make(
        script: dict[int, tuple[int, str]] | None = None, *, steps: int = 20, **limits: float
    ) -> Scripted:
        spec = RunSpec(
            train=TrainSpec(steps=steps),
            launch=LaunchSpec(
                ranks=2, env={"MFSDP_TEST_SCRIPT": json.dumps(script or {})}, **limits
            ),
        )
        made.append(Scripted(store, resolve_anywhere(spec)))
        return made[-1]

    yield make
    for run in made:
        for file in run.folder.path.glob("pid.*") if hasattr(run, "folder") else ():
            if alive(int(file.read_text())):
                os.kill(int(file.read_text()), 9)
