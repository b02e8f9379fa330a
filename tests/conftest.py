"""What every test folder shares: ranks, a results folder, and skips that say why."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from optional import skip_what_needs_more, take_surroundings

if TYPE_CHECKING:
    from bench.store import ResultsStore
    from bench.testing.workers import ForkServer

# A property that holds but is slow on a busy machine has not failed. Daily the same examples are
# drawn every time; `make nightly` draws others and says how to draw them again.
with contextlib.suppress(ModuleNotFoundError):  # the oldest torch is tried without it
    from hypothesis import settings

    settings.register_profile("daily", deadline=None, derandomize=True)
    settings.register_profile("nightly", deadline=None, print_blob=True)
    settings.load_profile("daily")


@pytest.fixture(autouse=True)
def same_draws_every_time() -> None:
    """What a test draws depends neither on the tests before it nor on the day."""
    random.seed(0)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)


@pytest.fixture(scope="session")
def fork_server() -> Iterator[ForkServer]:
    """What forks all ranks of tests that name no launcher: it loads torch once for all of them."""
    from bench.testing.workers import ForkServer
    from bench.validate.session import MODULES

    # The core loads torch's compiler, and every file of tests loads pytest.
    modules = (*MODULES, "pytest", "torch._dynamo")
    with ForkServer(paths=tuple(filter(None, sys.path)), modules=modules) as made:
        yield made


@pytest.fixture
def store(tmp_path: Path) -> ResultsStore:
    """An empty results folder."""
    from bench.store import ResultsStore

    return ResultsStore.open(tmp_path / "results", create=True)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    _leave_a_sample(items)
    _skip_without_devices(items)
    skip_what_needs_more(items)


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """The garbage collector need not walk through all tests and modules again and again."""
    gc.collect()
    gc.freeze()


def _leave_a_sample(items: list[pytest.Item]) -> None:
    """Of a test that is marked `sample`: few cases that hold every value daily, the rest nightly.

    Next is always the case with most values that no chosen one has, so that all of them change.
    """
    groups: dict[str, dict[pytest.Item, set[tuple[str, str]]]] = {}
    for item in items:
        parameters = getattr(getattr(item, "callspec", None), "params", {})
        if item.get_closest_marker("sample") and not item.get_closest_marker("nightly"):
            values = {(name, repr(value)) for name, value in parameters.items()}
            groups.setdefault(item.nodeid.partition("[")[0], {})[item] = values
    for cases in groups.values():
        missing = set().union(*cases.values())
        while missing:
            chosen = max(cases, key=lambda case: len(cases[case] & missing))
            missing -= cases.pop(chosen)
        for case in cases:
            case.add_marker(pytest.mark.nightly)


#: Of torch and its libraries on a device, which say nothing of this project; all others are errors.
DEVICE_WARNINGS = (
    "Attempting to run cuBLAS, but there was no current CUDA context",
    ".*The pynvml package is deprecated",
    ".*[Nn]o device.id is provided",
    "Guessing device ID based on global rank",
    "expandable_segments not supported",
    "The CUDA Graph is empty",
)


def _skip_without_devices(items: list[pytest.Item]) -> None:
    wanted = [item for item in items if {"gpu", "multigpu"} & {m.name for m in item.iter_markers()}]
    if not wanted:
        return
    import torch

    devices = torch.cuda.device_count()
    for item in wanted:
        for text in DEVICE_WARNINGS:
            item.add_marker(pytest.mark.filterwarnings(f"ignore:{text}"))
        needed = 2 if item.get_closest_marker("multigpu") else 1
        if devices < needed:
            reason = f"needs {needed} CUDA device(s), torch sees {devices}"
            item.add_marker(pytest.mark.skip(reason=reason))


def pytest_configure() -> None:
    """What of the caller's environment does not hold for tests.

    Where PYTHONDONTWRITEBYTECODE is set, every rank and command under test would compile all of the
    source anew. The files of tests share the cores among them, so none computes on all of them.
    Signals that the caller ignores (nohup, a job in the background) the runner leaves
    ignored, on purpose, and so would every process under test. Records of a test need not outlive a
    power cut, and waiting for the disk is most of what writing them takes.
    """
    take_surroundings(os.environ)
    os.fsync = lambda _: None
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    for number, handler in (
        (signal.SIGINT, signal.default_int_handler),
        (signal.SIGHUP, signal.SIG_DFL),
        (signal.SIGTERM, signal.SIG_DFL),
    ):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, handler)
