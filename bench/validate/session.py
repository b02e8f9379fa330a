"""A validation from cases to verdicts: resident ranks run, this process judges."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Literal, TypeVar

import torch

from bench.errors import UsageError
from bench.launch.command import SHARED_DEVICE
from bench.resolve.machine import Machine
from bench.testing.workers import ForkServer, Workers, WorkersError
from bench.validate import rank
from bench.validate.applicability import needs_ranks, why_not
from bench.validate.cases import Case
from bench.validate.fuzz.fixed import ProgramCase
from bench.validate.fuzz.session import outcome_of
from bench.validate.judge import judge, settings
from bench.validate.matrix import AnyCase
from bench.validate.ranks import CALLS_OF_A_GROUP, CallOutcome, outcome_on
from bench.verdict import CaseVerdict, CheckVerdict, Finding

#: What ranks find loaded.
MODULES = (
    "bench.validate.rank",
    "bench.validate.fuzz.rank",
    "bench.engines.stock",
    "bench.engines.optimizer",
)
DEFAULT_CASE_SECONDS = 30.0
DEFAULT_CPU_RANKS = 4
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
    machine = Machine.detect()
    device = torch.device(workers.device)

    def ended(ranks: Workers, case: AnyCase) -> CaseVerdict | CallOutcome:
        if isinstance(case, ProgramCase):
            return _program_verdict(case, ranks, workers)
        reason = why_not(case, workers.ranks, workers.device, machine)
        if reason is not None:
            return _not_applicable(case, reason, settings(case))
        arguments = (rank.run, case, workers.device)
        return outcome_on(ranks, *arguments, ranks=case.ranks, seconds=workers.case_seconds)

    wanted = itertools.takewhile(lambda _: stop is None or not stop.is_set(), cases)
    of_a_set = (workers.ranks, core, rank.prepare, CALLS_OF_A_GROUP)
    with contextlib.ExitStack() as stack:
        sets = [stack.enter_context(fork_server.workers(*of_a_set)) for _ in range(workers.sets)]
        with contextlib.closing(side_by_side(sets, wanted, ended)) as verdicts:
            for case, verdict in verdicts:
                if isinstance(case, Case) and isinstance(verdict, CallOutcome):
                    # References draw from torch's one generator: they are made in this thread.
                    yield judge(case, verdict, device, errors=errors)
                elif isinstance(verdict, CaseVerdict):
                    yield verdict
                if stop is not None and stop.is_set():
                    return


def _program_verdict(case: ProgramCase, ranks: Workers, workers: WorkerSettings) -> CaseVerdict:
    """A program has one check: all of it ends as plain torch does."""
    does = dataclasses.asdict(case.program) | {"does": case.name}
    reason = _why_not_here(case, workers)
    if reason is not None:
        return _not_applicable(case, reason, does)
    start = time.perf_counter()
    outcome = outcome_of(ranks, case.program)
    finding = None
    if outcome.kind != "equal":
        lines = [line for line in outcome.text.splitlines() if line.strip()]
        finding = Finding(
            expected="what plain torch does",
            found=f"{outcome.kind}: {lines[0] if lines else ''}",
            evidence=tuple(lines[1:][-_LINES_OF_TRACE:]),
        )
    verdict = CheckVerdict(
        check="as plain torch", state="failed" if finding else "passed", finding=finding
    )
    return CaseVerdict(
        case=case.id,
        engine=case.engine,
        state=verdict.state,
        settings=does,
        seconds=round(time.perf_counter() - start, 3),
        checks=(verdict,),
    )


def _why_not_here(case: AnyCase, workers: WorkerSettings) -> str | None:
    if case.ranks > workers.ranks:
        return needs_ranks(case.ranks, workers.ranks)
    return None if workers.device == "cpu" else "it runs on CPU ranks"


def _not_applicable(case: AnyCase, reason: str, settings: dict[str, Any]) -> CaseVerdict:
    return CaseVerdict(
        case=case.id,
        engine=case.engine,
        state="not_applicable",
        reason=reason,
        settings=settings,
    )


Item = TypeVar("Item")
Result = TypeVar("Result")


def side_by_side(
    sets: Sequence[Workers], items: Iterable[Item], body: Callable[[Workers, Item], Result]
) -> Generator[tuple[Item, Result], None, None]:
    """`body` for every item on one of the sets of ranks; results in the order of the items.

    A case waits more than it computes, so that two sets keep two cores busy.
    With one set an item is begun when the next result is requested. With more, closing the
    iterator kills the ranks that work ahead.
    """
    if len(sets) == 1:
        for item in items:
            yield item, body(sets[0], item)
        return
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
