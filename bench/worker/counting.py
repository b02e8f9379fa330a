"""Counts steps behind the last timed one, on every rank, and adds the ranks up."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter
from typing import Any, Final, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from bench.derive.counts import CountRow, Rates, StepCounts, added
from bench.loop import TrainingLoop
from bench.meters.call_sites import CallSites
from bench.meters.operation_counter import OperationCounter, varying
from bench.models.sharding import units
from bench.spec import ResolvedRun, known_engine
from bench.worker.rank_process import RankProcess

T = TypeVar("T")
_WARM_STEPS: Final = 2
_MOST_STEPS: Final = 7
_COPY_BYTES: Final = 16 * 2**20
_WIRE_BYTES: Final = 4 * 2**20
_LINES: Final = 20_000
_LAUNCHES: Final = ("LaunchKernel", "MemcpyAsync", "MemsetAsync", "GraphLaunch")


def count_steps(
    loop: TrainingLoop, model: nn.Module, resolved: ResolvedRun, process: RankProcess
) -> StepCounts:
    """The counts of one step, the same on every rank. Collective.

    Args:
        loop: has run all steps of `resolved`; its next steps are counted and not recorded.
        model: as the engine was given it.
        resolved: the run.
        process: this rank.
    """
    sites = CallSites(known_engine(resolved.engine.name).torch_code)
    step = resolved.train.steps
    before: list[CountRow] | None = None
    for repeat in range(1, _MOST_STEPS + 1):
        step += 1
        counter = OperationCounter(sites)
        with counter.counting():
            loop.step(step)
        rows = counter.rows()
        every = gathered(None if before is None else varying(before, rows), process)
        before = rows
        # Of the first step counting itself is a part: torch looks up the Python name of each
        # operation when it is first dispatched to Python.
        if repeat > _WARM_STEPS and not any(every):
            break
    differing = [name for names in every for name in names or ()]
    if is_compiled(model):
        differing.append("operations below torch.compile, which are counted as if it were off")
    rows = rows + _kernel_launches(loop, step + 1, process.device)
    return StepCounts(
        ranks=process.ranks,
        units=max(1, len(units(model))),
        microbatches=resolved.microbatches,
        rows=tuple(_sum(gathered(rows, process))),
        varying=tuple(sorted(set(differing))),
        rates=_rates(process.device),
    )


def is_compiled(model: nn.Module) -> bool:
    """Whether torch.compile runs parts of `model`; under a dispatch mode it leaves them eager."""
    return any(
        type(module).__name__ == "OptimizedModule"
        or getattr(module, "_compiled_call_impl", None) is not None
        for module in model.modules()
    )


def gathered(own: T, process: RankProcess) -> list[T]:
    """What every rank holds, in rank order. Collective."""
    if not dist.is_initialized():
        return [own]
    every: list[Any] = [None] * process.ranks
    dist.all_gather_object(every, own)
    return every


def _sum(ranks: Sequence[Sequence[CountRow]]) -> list[CountRow]:
    sums: dict[tuple[str, ...], CountRow] = {}
    for row in (row for rows in ranks for row in rows):
        key = (row.operation, row.kind, row.dtype, row.site)
        sums[key] = added(sums[key], row) if key in sums else row
    return [sums[key] for key in sorted(sums)]


def _kernel_launches(loop: TrainingLoop, step: int, device: torch.device) -> list[CountRow]:
    """Calls by which one more step gives work to the device; none on a CPU."""
    if device.type != "cuda":
        return []
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as recorded:
        loop.step(step)
    calls: dict[str, int] = {}
    for event in recorded.events():
        if any(part in event.name for part in _LAUNCHES) and event.name.startswith("cu"):
            calls[event.name] = calls.get(event.name, 0) + 1
    return [
        CountRow(operation=name, kind="kernel_launch", count=count)
        for name, count in sorted(calls.items())
    ]


def _rates(device: torch.device) -> Rates:
    source = torch.ones(_COPY_BYTES // 4, device=device)
    target, small = torch.empty_like(source), torch.ones(1, device=device)
    wire = torch.ones(_WIRE_BYTES // 4, device=device)
    copy = _seconds(lambda: target.copy_(source), 5, device)
    small_operation = _seconds(lambda: small.add_(1.0), 500, device)
    call = _seconds(_nothing, 5000, device)
    sent = None
    if dist.is_initialized() and dist.get_world_size() > 1:
        # This measures what the wire takes, and is no part of an engine.
        reduce = dist.all_reduce  # noqa: TID251
        sent = _WIRE_BYTES / _seconds(lambda: reduce(wire), 3, device)
    return Rates(
        copied_bytes_per_second=2 * _COPY_BYTES / copy,
        wire_bytes_per_second=sent,
        seconds_per_operation=small_operation,
        seconds_per_call=call,
        seconds_per_line=_seconds(_many_lines, 5, device) / _LINES,
    )


def _nothing() -> None:
    return


def _many_lines() -> None:
    left = _LINES // 2
    while left:
        left -= 1


def _seconds(call: Callable[[], object], times: int, device: torch.device) -> float:
    """Mean time of `call` after one that does not count."""
    finish = partial(torch.cuda.synchronize, device) if device.type == "cuda" else _nothing
    call()
    finish()
    start = perf_counter()
    for _ in range(times):
        call()
    finish()
    return (perf_counter() - start) / times
