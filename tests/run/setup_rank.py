"""What one rank of a run holds at set-up, and the values that its optimizer begins with."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from live_peak import LivePeak
from torch import Tensor, nn

from bench.engines.registry import build_engine
from bench.meters.memory_profile import MemoryProfile
from bench.models.build import build_model, model_on_meta, run_model
from bench.models.sharding import units
from bench.spec import ResolvedRun
from bench.worker.fingerprints import fingerprints
from bench.worker.rank_process import RankProcess

CPU = torch.device("cpu")


def built(model: nn.Module, run: ResolvedRun) -> Any:
    """The engine; the core in place of megatron_fsdp, which needs CUDA."""
    if run.engine.name != "megatron_fsdp":
        return build_engine(model, run, CPU)
    from test_engine_megatron_fsdp import Stepping

    from bench.engines.megatron_fsdp import MegatronFsdpEngine

    return MegatronFsdpEngine(model, run, CPU, Stepping())


def packages(run: ResolvedRun) -> AbstractContextManager[object]:
    """A stand-in of Transformer Engine, where the run has its layers."""
    if run.linear.kind == "torch":
        return nullcontext()
    from oracle import transformer_engine

    return transformer_engine.installed()


def peak_of_setup(run: ResolvedRun) -> int:
    """Of torch's CPU allocator, while the model is built and sharded.

    Without the 32 MB that the core asks glibc for and gives back, of which no page is touched.
    """
    with mock.patch("mfsdp_core.memory.allocation._LARGEST_KEPT_BYTES", 1):
        profile = MemoryProfile(CPU)
        model, _ = run_model(run, CPU)
        engine = build_engine(model, run, CPU)
        profile.stop()
    del engine
    assert profile.allocator_peak_bytes is not None
    return profile.allocator_peak_bytes


def live_setup(run: ResolvedRun) -> dict[str, int]:
    """Bytes of storage: the most at set-up, what is left after it; FP32 (FP64) bytes of the model.

    largest: of its largest unit or of what the root has, whichever is more. Few values are drawn at
    once, so that the temporaries of a small model are not larger than it is.
    """
    model = model_on_meta(run.shape, recompute="none", seed=0)
    size = 8 if run.dtypes.compute == "fp64" else 4
    sizes = [size * sum(p.numel() for p in unit.parameters()) for unit in units(model)]
    whole = size * sum(p.numel() for p in model.parameters())
    few = mock.patch.dict("bench.models.initial_values.CHUNK_ELEMENTS", cpu=2**12)
    with few, packages(run), LivePeak() as live:
        model, _ = run_model(run, CPU)
        engine = built(model, run)
        found = {"peak": live.peak, "after": live.alive()}
    getattr(engine, "close", lambda: None)()
    return found | {"whole": whole, "largest": max(*sizes, whole - sum(sizes))}


def start_of(run: ResolvedRun) -> dict[str, str]:
    """Fingerprints of what the engine begins with."""
    process = RankProcess(dist.get_rank(), dist.get_world_size(), CPU)
    with packages(run):
        model: Any = run_model(run, CPU)[0]
        engine = built(model, run)
        return fingerprints(engine, model.initial_values.first_rows, process)


def unequal_start(run: ResolvedRun) -> dict[str, str]:
    """The same, where rank 1 has changed an element of a parameter that all ranks replicate."""
    model: Any = run_model(run, CPU)[0]
    engine = built(model, run)
    if dist.get_rank():
        engine.parts()[-1].rows.view(-1)[0] += 1
    process = RankProcess(dist.get_rank(), dist.get_world_size(), CPU)
    return fingerprints(engine, {}, process)


def differences_from_whole(run: ResolvedRun) -> list[str]:
    """Of a model on the meta device: weights and losses that one built whole has not, bit for bit.

    The whole one has FP32 values when the engine gets it, as a model of a user's own.
    """
    with packages(run):
        model, _ = run_model(run, CPU)
        wrong = [] if any(p.is_meta for p in model.parameters()) else ["not on the meta device"]
        weights, losses = _trained(built(model, run), run)
        shape, seed = run.shape, run.train.seed
        assert run.linear.kind == "torch"
        whole: Any = build_model(shape, recompute=run.recompute, seed=seed, device=CPU)
        expected, expected_losses = _trained(built(whole, run), run)
    wrong += [name for name in expected if not _is_same(weights[name], expected[name])]
    return wrong + [f"losses {losses}"] * (losses != expected_losses)


def _trained(engine: Any, run: ResolvedRun) -> tuple[dict[str, Tensor], list[float]]:
    """Rows of the initial weights, and the losses of two steps."""
    weights = engine.inspection().weights()
    rows = {name: part.rows.clone() for name, part in weights.items()}
    tokens = torch.arange(2 * 32).reshape(2, 32) % run.shape.vocab
    losses = []
    for _ in range(2):
        engine.set_learning_rate(1e-3)
        losses.append(engine.forward_backward(tokens, tokens, 1.0, True).item())
        engine.optimizer_step()
        engine.zero_grad()
    return rows, losses


def _is_same(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one, other)
