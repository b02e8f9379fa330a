"""Passes of a tiny model under the run's engine: what they cost the host ([Note: host time])."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch

from bench.derive.host_time import HostPass
from bench.engines.dtypes import TORCH_DTYPES
from bench.engines.protocol import Engine
from bench.engines.registry import build_engine
from bench.engines.stock import scaled_backward
from bench.errors import BenchError
from bench.meters.call_sites import CallSites
from bench.meters.cpu_time import CpuMeter, spent
from bench.meters.operation_counter import OperationCounter
from bench.models.build import run_model
from bench.models.initialisation import materialise
from bench.models.units import units
from bench.spec import ModelShape, ResolvedRun, known_engine
from bench.worker.counting import gathered
from bench.worker.rank_process import RankProcess

_LAYERS: Final = 8
_WARM_UP: Final = 3
_PASSES: Final = 20
_COUNTED: Final = 3
"""Of the first counted pass counting itself is a part."""
_OF_THE_HOST: Final = ("main", "autograd")
_SHAPE: Final = ModelShape(
    preset="host",
    layers=_LAYERS,
    hidden=32,
    ffn_hidden=64,
    heads=4,
    kv_heads=4,
    head_dim=8,
    vocab=64,
    tie_embeddings=False,
)


def measure_host(resolved: ResolvedRun, process: RankProcess) -> HostPass:
    """All passes of all ranks, the same on every rank. Collective."""
    small = resolved.model_copy(update={"shape": _SHAPE, "factory": None})
    if small.engine.expert_parallel > 1:
        return HostPass(reason="its decoder has no experts to spread")
    if _SHAPE.heads % small.engine.tensor_parallel:
        return HostPass(reason=f"its decoder has {_SHAPE.heads} heads to cut")
    try:
        plain, _ = run_model(small, process.device)
        materialise(plain, process.device)
        model, _ = run_model(small, process.device)
        engine = build_engine(model, small, process.device)
    except BenchError as refusal:
        return HostPass(reason=str(refusal))
    plain.to(TORCH_DTYPES[resolved.dtypes.compute])
    tokens = torch.zeros((1, 16), dtype=torch.int64, device=process.device)

    def with_engine() -> None:
        engine.forward_backward(tokens, tokens, 1.0, True)

    def alone() -> None:
        scaled_backward(plain(tokens, tokens), 1.0)

    try:
        times = _times(process.device, {with_engine: _stepping(engine), alone: plain.zero_grad})
        calls = _calls(with_engine, _stepping(engine), resolved)
    finally:
        getattr(engine, "close", lambda: None)()
    ours = gathered((times[with_engine], times[alone], calls), process)
    return HostPass(
        units=len(units(plain)),
        microseconds=tuple(one for one, _, _ in ours),
        model_microseconds=tuple(one for _, one, _ in ours),
        calls=tuple(one for _, _, one in ours),
    )


def _stepping(engine: Engine) -> Callable[[], None]:
    """What lies between two passes: an engine may want a step after each."""

    def step() -> None:
        engine.optimizer_step()
        engine.zero_grad()

    return step


def _times(
    device: torch.device, passes: dict[Callable[[], None], Callable[[], None]]
) -> dict[Callable[[], None], tuple[float, ...]]:
    """Microseconds of the host's threads, of each pass; the kinds take turns."""
    meter = CpuMeter()
    found: dict[Callable[[], None], list[float]] = {one: [] for one in passes}
    for _ in range(_WARM_UP + _PASSES):
        for one, between in passes.items():
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            before = meter.read()
            one()
            by_role = spent(before, meter.read()) or {}
            found[one].append(1e3 * sum(by_role.get(role, 0.0) for role in _OF_THE_HOST))
            between()
    return {one: tuple(times[_WARM_UP:]) for one, times in found.items()}


def _calls(one: Callable[[], None], between: Callable[[], None], resolved: ResolvedRun) -> int:
    """Of Python, by the engine's own code, in one pass."""
    sites = CallSites(known_engine(resolved.engine.name).torch_code)
    for _ in range(_COUNTED):
        counter = OperationCounter(sites)
        with counter.counting():
            one()
        between()
    return sum(row.count for row in counter.rows() if row.kind == "python_call")
