"""What a rank does for `training`; loads the core when it is called, as forked ranks must."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from bench.engines.ledger_view import HasLedger
from bench.spec import ResolvedRun

_WARM_UP = 2


@dataclass(frozen=True)
class Trained:
    """One rank's account. Bytes after each step; those of the device are None on a CPU.

    is_captured: of a step that is to be a CUDA graph, else None.
    """

    losses: list[float]
    milliseconds: list[float]
    resting_bytes: list[int]
    allocated_bytes: list[int] | None
    reserved_bytes: list[int] | None
    peak_allocated_bytes: int | None
    allocation_retries: int | None
    is_captured: bool | None = None

    @property
    def step_milliseconds(self) -> float:
        """Median of the steps after the warm-up."""
        return median(self.milliseconds[_WARM_UP:] or self.milliseconds)


def train(document: dict[str, Any], captures: bool = True) -> Trained:
    """In a rank: train, and look after every step.

    captures: whether an engine with `cuda_graph` may replay steps; else it enqueues them all.
    """
    from bench.data.batches import build_batches
    from bench.engines.registry import build_engine
    from bench.loop import TrainingLoop
    from bench.meters.sample_sink import SampleSink
    from bench.models.build import run_model

    resolved = ResolvedRun.model_validate(document)
    device = torch.device("cpu")
    if resolved.launch.device == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    model, make_batch = run_model(resolved, device)
    batches = build_batches(resolved, dist.get_rank(), device, make_batch)
    engine: Any = build_engine(model, resolved, device)
    if not captures:
        engine.captured = lambda _iteration: None
    resting, allocated, reserved = [], [], []
    outcomes = []
    with SampleSink(Path(os.devnull), dist.get_rank()) as sink:
        loop = TrainingLoop(engine, batches, resolved, device=device, sink=sink)
        for step in range(1, resolved.train.steps + 1):
            outcomes.append(loop.step(step))
            resting.append(_held_bytes(engine))
            if device.type == "cuda":
                allocated.append(torch.cuda.memory_allocated(device))
                reserved.append(torch.cuda.memory_reserved(device))
    is_cuda = device.type == "cuda"
    return Trained(
        losses=[outcome.loss for outcome in outcomes],
        milliseconds=[outcome.milliseconds for outcome in outcomes],
        resting_bytes=resting,
        allocated_bytes=allocated if is_cuda else None,
        reserved_bytes=reserved if is_cuda else None,
        peak_allocated_bytes=torch.cuda.max_memory_allocated(device) if is_cuda else None,
        allocation_retries=torch.cuda.memory_stats(device)["num_alloc_retries"]
        if is_cuda
        else None,
        is_captured=getattr(loop.captured, "is_captured", None),
    )


def _held_bytes(engine: object) -> int:
    """What the engine's own account says that it holds; 0 without an account."""
    held = engine.ledger().bytes_by_category() if isinstance(engine, HasLedger) else {}
    return sum(held.values())
