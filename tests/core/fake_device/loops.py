"""The benchmark's own loop over `FakeCuda`: engines, models and captured steps."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from bench.data.batches import build_batches
from bench.engines.registry import build_engine
from bench.loop import TrainingLoop
from bench.models.build import run_model
from bench.resolve.resolution import resolve_anywhere
from bench.spec import RunSpec

DEVICE = torch.device("cuda", 0)
STEPS = {"steps": 6, "global_batch": 8, "micro_batch": 1, "seq_len": 8}
GRAPH = {
    "name": "mfsdp", "cuda_graph": True, "double_buffer": True, "allocator": "fixed_pool",
    "transport": "native",
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "recomputed": {"preset": "debug", "recompute": "full"},
    "recomputed in part": {"preset": "debug", "recompute": "selective"},
    "hybrid": {"preset": "hybrid-tiny"},
    "hybrid, recomputed": {"preset": "hybrid-tiny", "recompute": "full"},
    "experts and prediction": {"preset": "hybrid-tiny", "pattern": "M*E/*E/E", "recompute": "full"},
}


def run(engine: dict[str, Any], model: dict[str, Any], compute: str = "bf16") -> None:
    """All steps of a run; one with graphs ends with replays."""
    spec = {"model": model, "engine": engine, "train": STEPS, "dtypes": {"compute": compute}}
    resolved = resolve_anywhere(
        RunSpec.model_validate(spec | {"launch": {"ranks": 4, "device": "cuda"}})
    )
    module, make_batch = run_model(resolved, DEVICE)
    built: Any = build_engine(module, resolved, DEVICE)
    batches = build_batches(resolved, 0, DEVICE, make_batch)
    samples: Any = []
    loop = TrainingLoop(built, batches, resolved, device=DEVICE, sink=samples)
    loop.run()
    assert len(samples) == STEPS["steps"]
    assert loop.captured is None or loop.captured.is_captured
    assert (loop.captured is not None) == bool(engine.get("cuda_graph"))


RUNS: dict[str, Callable[[], None]] = {
    **{
        f"loop of {name}": partial(run, {"name": name}, MODELS["recomputed in part"])
        for name in ("mfsdp", "fsdp2")
    },
    **{f"captured loop, {name}": partial(run, GRAPH, model) for name, model in MODELS.items()},
    "captured loop in FP32": partial(run, GRAPH, MODELS["recomputed"], "fp32"),
}
