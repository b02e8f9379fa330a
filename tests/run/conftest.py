"""Running real cells on real ranks, and reading back what they left."""

from __future__ import annotations

import contextlib
import json
import random
import socket
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from bench.record import StepSample
from bench.spec import ResolvedRun
from bench.testing.workers import ForkServer


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
WantedCells = Callable[[Mapping[str, ResolvedRun]], dict[str, ResolvedRun]]


def run_cells(
    server: ForkServer, root: Path, runs: Mapping[str, ResolvedRun], core: Path | None = None
) -> dict[str, FinishedCell]:
    """All runs, which need the same number of ranks, on that many forks of `server`.

    core: a folder with a copy of mfsdp_core that the ranks import instead.
    """
    from rank_program import run_in_turn  # loads torch

    (ranks,) = {run.launch.ranks for run in runs.values()}
    cells = {name: FinishedCell(root / name, ranks) for name in runs}
    for name, run in runs.items():
        cells[name].folder.mkdir()
        (cells[name].folder / "spec.json").write_text(run.model_dump_json())
    places = [(_free_port(), cell.folder) for cell in cells.values()]
    with server.workers(ranks, core) as workers:
        failed = workers.run(run_in_turn, places, seconds=60 + 20 * len(places))
    for name, cell in cells.items():
        assert not cell.failures, f"{name}:\n" + "\n".join(cell.failures)
    assert failed == [0] * ranks
    return cells


def _free_port() -> int:
    """One that the kernel gives to no connection of its own accord: it may be used much later."""
    for port in random.SystemRandom().sample(range(20000, 32000), 100):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise RuntimeError("100 ports of 127.0.0.1 are taken")


@pytest.fixture(scope="session", name="run_cells")
def run_cells_fixture(fork_server: ForkServer) -> RunCells:
    """`run_cells`, for tests that choose their own cells."""
    return partial(run_cells, fork_server)


@pytest.fixture(scope="module")
def workers(fork_server: ForkServer) -> Iterator[Callable[..., list[Any]]]:
    """`workers(function, *arguments)`: what it returns on two ranks."""
    with fork_server.workers(2) as found:
        yield partial(found.run, seconds=180)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of a cell in their module's NIGHTLY_CELLS are nightly."""
    for item in items:
        if _cell(item) in getattr(getattr(item, "module", None), "NIGHTLY_CELLS", ()):
            item.add_marker(pytest.mark.nightly)


def _cell(item: pytest.Item) -> Any:
    return getattr(getattr(item, "callspec", None), "params", {}).get("name")


@pytest.fixture(scope="module")
def wanted_cells(request: pytest.FixtureRequest) -> WantedCells:
    """Of a module's cells those that are not nightly, and those that a selected test names."""
    named = {_cell(item) for item in request.session.items if item.path == request.path}
    left_out = set(request.module.NIGHTLY_CELLS) - named
    return lambda cells: {name: cell for name, cell in cells.items() if name not in left_out}


@pytest.fixture
def world_of_one() -> Iterator[None]:
    """This process is the only rank of a gloo group."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def fake_group() -> Iterator[None]:
    """One of four ranks of torch's fake group, where collectives leave memory as it is."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
    yield
    dist.destroy_process_group()


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
