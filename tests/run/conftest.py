"""Running real cells on real ranks, and reading back what they left."""

from __future__ import annotations

import contextlib
import json
import os
import random
import socket
import subprocess
import sys
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from bench.record import StepSample
from bench.spec import ResolvedRun

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class FinishedCell:
    """A run folder after its ranks have ended, read without the store."""

    folder: Path
    ranks: int

    def samples(self, rank: int = 0) -> list[StepSample]:
        lines = map(json.loads, (self.folder / "steps.node0.jsonl").read_text().splitlines())
        return [StepSample(**line) for line in lines if line.pop("rank") == rank]

    @property
    def losses(self) -> list[float]:
        by_rank = [[sample.loss for sample in self.samples(rank)] for rank in range(self.ranks)]
        return [sum(step) / len(step) for step in zip(*by_rank, strict=True)]

    @property
    def norms(self) -> list[float]:
        """Gradient norm of every step, as the first rank has it."""
        return [sample.grad_norm for sample in self.samples()]

    def document(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.folder / name).read_text())
        return found

    @property
    def failures(self) -> list[str]:
        files = sorted(self.folder.glob("failure.rank*.json"))
        return [json.loads(file.read_text())["traceback"] for file in files]


RunCells = Callable[..., dict[str, FinishedCell]]


def run_cells(
    root: Path, runs: Mapping[str, ResolvedRun], core: Path | None = None
) -> dict[str, FinishedCell]:
    """All runs, which need the same number of ranks, on that many processes started once.

    core: a folder with a copy of mfsdp_core that the ranks import instead.
    """
    (ranks,) = {run.launch.ranks for run in runs.values()}
    cells = {}
    arguments = []
    for name, run in runs.items():
        folder = root / name
        folder.mkdir()
        (folder / "spec.json").write_text(run.model_dump_json())
        arguments.append(f"{_free_port()}={folder}")
        cells[name] = FinishedCell(folder, ranks)
    command = [sys.executable, str(Path(__file__).parent / "rank_program.py"), *arguments]
    processes = [
        subprocess.Popen(
            command,
            cwd=ROOT,
            env=os.environ
            | {
                "PYTHONPATH": os.pathsep.join(map(str, filter(None, (core, ROOT)))),
                "RANK": str(rank),
                "WORLD_SIZE": str(ranks),
                "MASTER_ADDR": "127.0.0.1",
                "OMP_NUM_THREADS": "1",
                "PYTHONWARNINGS": "error",
            },
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    try:
        errors = [process.communicate(timeout=180)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    for name, cell in cells.items():
        assert not cell.failures, f"{name}:\n" + "\n".join(cell.failures)
    assert [process.returncode for process in processes] == [0] * ranks, "\n".join(errors)
    return cells


def _free_port() -> int:
    """One that the kernel gives to no connection of its own accord: it may be used much later."""
    for port in random.sample(range(20000, 32000), 100):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise RuntimeError("100 ports of 127.0.0.1 are taken")


@pytest.fixture(scope="session", name="run_cells")
def run_cells_fixture() -> RunCells:
    """`run_cells`, for tests that choose their own cells."""
    return run_cells


@pytest.fixture
def free_port() -> int:
    """A TCP port that was free a moment ago."""
    return _free_port()


@pytest.fixture
def make_wheel() -> Callable[[Path, str, str, Mapping[str, str]], Path]:
    """`make_wheel(folder, name, version, files)`: installing it needs no build and no network."""
    return _wheel


def _wheel(folder: Path, name: str, version: str, files: Mapping[str, str]) -> Path:
    path = folder / f"{name}-{version}-py3-none-any.whl"
    info = f"{name}-{version}.dist-info"
    folder.mkdir(exist_ok=True)
    with zipfile.ZipFile(path, "w") as archive:
        for file, text in files.items():
            archive.writestr(file, text)
        archive.writestr(
            f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        )
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    return path
