"""A validation from cases to verdicts: resident ranks run, this process judges."""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Literal, TypeVar

import torch

from bench.errors import UsageError
from bench.launch.command import SHARED_DEVICE
from bench.resolve.machine import Machine
from bench.testing.workers import ForkServer, Workers, WorkersError
from bench.validate import rank
from bench.validate.applicability import why_not
from bench.validate.cases import AnyCase
from bench.validate.judge import judge
from bench.validate.outcomes import DEFAULT_CPU_RANKS, outcome_of, outcome_on, resident
from bench.validate.program import Program
from bench.validate.rank import Outcome
from bench.verdict import CaseVerdict

#: What ranks find loaded.
MODULES = ("bench.validate.rank", "bench.engines.stock", "bench.engines.optimizer")
DEFAULT_CASE_SECONDS = 30.0
_LINES_OF_TRACE = 6
LOAD_SECONDS = 60.0
_MOST_SETS = 6


@dataclass(frozen=True)
class WorkerSettings:
    """Where cases run: how many ranks at most, on which kind of device, each case how long.

    sets: cases that run side by side.
    """

    ranks: int = DEFAULT_CPU_RANKS
    device: Literal["cpu", "cuda"] = "cpu"
    case_seconds: float = DEFAULT_CASE_SECONDS
    sets: int = 1

    @classmethod
    def of_this_machine(cls, ranks: int | None, case_seconds: float) -> WorkerSettings:
        """CUDA where there are devices (one rank on each), else sets of four CPU ranks.

        Where NCCL may let ranks share devices, as many as are requested.
        """
        devices = len(Machine.detect().cuda_devices)
        if devices and torch.cuda.is_available():
            shares = ranks is not None and os.environ.keys() >= SHARED_DEVICE.keys()
            most = ranks if shares else devices
            return cls(min(ranks or devices, most or devices), "cuda", case_seconds)
        sets = min(_MOST_SETS, max(3, len(os.sched_getaffinity(0)) // 2))
        return cls(ranks or DEFAULT_CPU_RANKS, "cpu", case_seconds, sets)


def check_that_they_load(fork_server: ForkServer, engines: Iterable[str]) -> None:
    """Import the engines that somebody else wrote, on a rank; whether they train is for the cases.

    Raises:
        UsageError: a module that raises, or without the factory.
    """
    for engine in filter(lambda name: ":" in name, engines):
        try:
            with fork_server.workers(1) as workers:
                workers.run(rank.load, engine, seconds=LOAD_SECONDS)
        except WorkersError as error:
            *trace, last = error.failures[0].text.strip().splitlines()
            text = f"engine {engine} cannot be loaded: {last}"
            raise UsageError("\n".join([text, *trace[-_LINES_OF_TRACE:]])) from None


def verdicts(
    fork_server: ForkServer,
    cases: Iterable[AnyCase],
    workers: WorkerSettings,
    *,
    core: Path | None = None,
    stop: threading.Event | None = None,
    errors: bool = False,
) -> Generator[CaseVerdict, None, None]:
    """One verdict per case, in order, each as soon as it is known; ends early after `stop`.

    core: folder with the mfsdp_core that the ranks import, None is the checkout's own. errors:
    whether verdicts have those of every gradient.
    """
    torch.set_num_threads(1)
    wanted = itertools.takewhile(lambda _: stop is None or not stop.is_set(), cases)
    with contextlib.ExitStack() as stack:
        make = partial(resident, fork_server, workers.ranks, core)
        sets = [stack.enter_context(make()) for _ in range(workers.sets)]
        run = partial(outcome_here, workers, Machine.detect())
        with contextlib.closing(side_by_side(sets, wanted, run)) as outcomes:
            for case, outcome in outcomes:
                # References draw from torch's one generator: they are made in this thread.
                yield judge(case, outcome, torch.device(workers.device), errors=errors)
                if stop is not None and stop.is_set():
                    return


def outcome_here(
    settings: WorkerSettings, machine: Machine, ranks: Workers, case: AnyCase
) -> Outcome:
    """How a case or a program ends on `ranks`, which were made with these settings."""
    reason = why_not(case, settings.ranks, settings.device, machine)
    if reason is not None:
        return Outcome("not_run", text=reason)
    if isinstance(case, Program):
        return outcome_of(ranks, case)
    arguments = (rank.run, case, settings.device)
    return outcome_on(ranks, *arguments, ranks=case.ranks, seconds=settings.case_seconds)


Item = TypeVar("Item")
Result = TypeVar("Result")


def side_by_side(
    sets: Sequence[Workers], items: Iterable[Item], body: Callable[[Workers, Item], Result]
) -> Generator[tuple[Item, Result], None, None]:
    """`body` for every item on one of the sets of ranks; results in the order of the items.

    A case waits more than it computes, so that two sets keep two cores busy. Closing the iterator
    kills the ranks that work ahead.
    """
    free: SimpleQueue[Workers] = SimpleQueue()
    for workers in sets:
        free.put(workers)

    def run(item: Item) -> Result:
        workers = free.get()
        try:
            return body(workers, item)
        finally:
            free.put(workers)

    begun: deque[tuple[Item, Future[Result]]] = deque()
    with ThreadPoolExecutor(len(sets)) as pool:
        try:
            for item in items:
                begun.append((item, pool.submit(run, item)))
                if len(begun) > len(sets):
                    yield begun[0][0], begun.popleft()[1].result()
            while begun:
                yield begun[0][0], begun.popleft()[1].result()
        finally:
            if begun:
                pool.shutdown(wait=False, cancel_futures=True)
                for workers in sets:
                    workers.kill()
