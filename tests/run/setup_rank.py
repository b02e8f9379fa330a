"""What one rank of a run holds at set-up, and the values that its optimizer begins with."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
from torch import Tensor

from bench.engines.local_tensor import local_tensor
from bench.engines.registry import build_engine
from bench.meters.memory_profile import MemoryProfile
from bench.models.build import build_model, run_model
from bench.spec import ResolvedRun

CPU = torch.device("cpu")


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


def differences_from_whole(run: ResolvedRun) -> list[str]:
    """Of a model drawn by unit: weights and losses that one built whole has not, bit for bit."""
    model, _ = run_model(run, CPU)
    wrong = [] if all(p.is_meta for p in model.parameters()) else ["not on the meta device"]
    shape, seed = run.shape, run.train.seed
    whole = build_model(shape, recompute=run.recompute, seed=seed, device=CPU)
    first, second = (build_engine(one, run, CPU) for one in (model, whole))
    pairs = zip(_optimized(first), _optimized(second), strict=True)
    wrong += [f"weight {index}" for index, (a, b) in enumerate(pairs) if not _is_same(a, b)]
    tokens = torch.arange(2 * 32).reshape(2, 32) % shape.vocab
    for step in range(2):
        losses = []
        for engine in (first, second):
            engine.set_learning_rate(1e-3)
            losses.append(engine.forward_backward(tokens, tokens, 1.0, True))
            engine.optimizer_step()
            engine.zero_grad()
        if not torch.equal(*losses):
            wrong.append(f"loss of step {step}")
    return wrong


def _optimized(engine: Any) -> list[Tensor]:
    optimizer = engine.optimizer
    found = [p for group in optimizer.param_groups for p in group["params"]]
    return [local_tensor(p.detach()) for p in found]


def _is_same(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one, other)
