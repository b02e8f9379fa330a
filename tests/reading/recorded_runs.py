"""A results folder filled through `bench.store` with runs that never ran, damaged at will.

Times, losses and memory follow simple rules per engine, strategy and dtype, with seeded noise.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from stand_in_runs import append_samples

from bench.record import RunStatus, StepSample
from bench.spec import (
    DataSpec,
    EngineSpec,
    LaunchSpec,
    MeasureSpec,
    ModelShape,
    ResolvedDtypes,
    ResolvedRun,
    TrainSpec,
)
from bench.store import ResultsStore, RunFolder, layout

TINY = ModelShape(
    preset="tiny",
    layers=8,
    hidden=384,
    ffn_hidden=1024,
    heads=6,
    kv_heads=6,
    head_dim=64,
    vocab=512,
    tie_embeddings=False,
)
MEMORY = {"no_shard": 1.0, "optim": 0.75, "optim_grads": 0.6, "optim_grads_params": 0.5}
SPEED = {"single": 1.7, "ddp": 1.0, "fsdp2": 1.12, "mfsdp": 1.05}


def resolved_run(
    engine: str = "mfsdp",
    strategy: str = "optim_grads_params",
    *,
    dtype: str = "fp32",
    comm: str = "fp32",
    ranks: int = 2,
    **changes: Any,
) -> ResolvedRun:
    """A run of 20 steps on CPU ranks; `changes` replace whole sections."""
    sections: dict[str, Any] = {
        "shape": TINY,
        "recompute": "none",
        "data": DataSpec(kind="text"),
        "engine": EngineSpec(name=engine, strategy=strategy),
        "dtypes": ResolvedDtypes(
            compute=dtype, main_params="fp32", main_grads="fp32", grad_comm=comm
        ),
        "train": TrainSpec(steps=20, global_batch=4, micro_batch=2, seq_len=128, warmup_steps=5),
        "launch": LaunchSpec(ranks=ranks),
        "measure": MeasureSpec(),
        "data_parallel": ranks,
        "microbatches": 1,
    }
    return ResolvedRun(**{**sections, **changes})


@dataclass
class Recorded:
    """What `record_run` writes, each replaceable."""

    resolved: ResolvedRun
    cell: str | None = None
    sweep: str | None = "quickstart"
    state: str = "ok"
    reason: str = ""
    repeat: int = 0
    arm: str | None = None
    code: str = "code-1"
    steps: int | None = None
    speed: float = 1.0
    loss_shift: float = 0.0
    noise: float = 1.0
    seed: int = 0
    started: str = "2026-03-01T10:00:00.000Z"
    environment: dict[str, Any] = field(default_factory=dict)
    milliseconds: Callable[[int], float] | None = None


def environment() -> dict[str, Any]:
    return {
        "hostname": "bench-node",
        "cpu_name": "Example CPU 9000",
        "cpu_count": 2,
        "memory_bytes": 8 * 2**30,
        "cuda_devices": [],
        "git": {"commit": "0123456789abcdef", "dirty": False, "dirty_hash": None},
        "runtime": {"python": "3.11.8", "torch": "2.13.0", "device_names": []},
    }


def record_run(store: ResultsStore, run: Recorded) -> RunFolder:
    """Write one run, complete and closed."""
    resolved = run.resolved
    with store.new_run(
        resolved, sweep=run.sweep, cell=run.cell, repeat=run.repeat, arm=run.arm, code=run.code
    ) as folder:
        folder.write_environment({**environment(), **run.environment})
        count = resolved.train.steps if run.steps is None else run.steps
        for rank in range(resolved.launch.ranks):
            write_samples(folder, run, rank, count)
        if run.state == "ok":
            (folder.path / "memory.json").write_text(
                json.dumps({"rank": 0, "by_category_bytes": ledger(resolved)})
            )
        status = folder.status.model_copy(
            update={
                "state": run.state,
                "reason": run.reason,
                "started_utc": run.started,
                "ended_utc": run.started.replace("10:00", "10:01"),
            }
        )
        _write_old_status(folder, status)
    return folder


def _write_old_status(folder: RunFolder, status: RunStatus) -> None:
    """As a version before checksums wrote it, so that tests may change files of the run."""
    later = {"checksum", "files", "job", "packed"}
    (folder.path / layout.STATUS).write_text(status.model_dump_json(exclude=later))


def write_samples(folder: RunFolder, run: Recorded, rank: int, count: int) -> None:
    """Warm-up of three slow steps, 4 % noise, now and then an outlier; a falling loss."""
    resolved = run.resolved
    noise = random.Random(f"{run.seed}-{resolved.config_hash}-{run.repeat}")
    engine = resolved.engine.model_dump_json(exclude_defaults=True)
    rounding = random.Random(f"{run.seed}-{engine}-{resolved.dtypes}")
    unit = 1e-3 if resolved.dtypes.compute == "bf16" else 4e-7
    base = 210.0 * SPEED.get(resolved.engine.name, 1.0) * run.speed
    base *= 0.8 if resolved.dtypes.compute == "bf16" else 1.0
    share = MEMORY[resolved.strategy]
    samples = []
    for step in range(1, count + 1):
        slow = {1: 4.0, 2: 1.6, 3: 1.3}.get(step, 1.0)
        outlier = 2.2 if noise.random() < 0.06 else 1.0
        measured = base * slow * outlier * noise.gauss(1.0, 0.04) + 0.5 * rank
        true_loss = 2.1 + 4.2 * 0.86**step
        sample = StepSample(
            step=step,
            milliseconds=run.milliseconds(step) if run.milliseconds else measured,
            loss=true_loss * (1 + run.noise * rounding.gauss(0, unit) + run.loss_shift)
            + 0.01 * (rank - 0.5),
            grad_norm=1.4 * 0.97**step,
            learning_rate=3e-4,
            tokens=resolved.tokens_per_step // resolved.launch.ranks,
            wire_bytes=None if resolved.engine.name == "single" else int(60e6 * (2.0 - share)),
            rss_bytes=int(420e6 + 160e6 * share),
        )
        samples.append(sample)
    append_samples(folder, rank, *samples)


def ledger(resolved: ResolvedRun) -> dict[str, int]:
    weights = 4 * resolved.shape.parameters
    share = MEMORY[resolved.strategy]
    return {
        "main_weights": int(weights * share),
        "compute_weights": int(0.3 * weights),
        "gradients": int(weights * share),
        "communication_buffers": int(0.15 * weights),
        "optimizer_state": int(2 * weights * share),
    }


def write_plan(
    store: ResultsStore,
    cells: Iterable[tuple[str, ResolvedRun]],
    *,
    sweep: str = "quickstart",
    pruned: Iterable[dict[str, Any]] = (),
    duplicates: Iterable[dict[str, Any]] = (),
) -> None:
    store.write_plan(
        sweep,
        {
            "plan_version": 1,
            "id": sweep,
            "name": sweep,
            "description": "Engines and sharding strategies in two dtype policies",
            "source": f"sweeps/{sweep}.yaml",
            "set": {},
            "cells": [
                {
                    "id": name,
                    "labels": {},
                    "repeats": 1,
                    "config_hash": resolved.config_hash,
                    "slug": resolved.slug,
                    "resolved": resolved.model_dump(mode="json"),
                }
                for name, resolved in cells
            ],
            "pruned": list(pruned),
            "duplicates": list(duplicates),
        },
    )


QUICKSTART = (
    ("ddp", "no_shard"),
    ("fsdp2", "optim_grads_params"),
    ("mfsdp", "no_shard"),
    ("mfsdp", "optim"),
    ("mfsdp", "optim_grads"),
    ("mfsdp", "optim_grads_params"),
)


def quickstart_cells() -> list[tuple[str, ResolvedRun]]:
    cells = []
    for engine, strategy in QUICKSTART:
        for dtype, comm in (("fp32", "fp32"), ("bf16", "bf16")):
            name = f"{engine}-{strategy}-{dtype}" if engine == "mfsdp" else f"{engine}-{dtype}"
            cells.append((name, resolved_run(engine, strategy, dtype=dtype, comm=comm)))
    return cells


def fill_quickstart(store: ResultsStore, sweep: str = "quickstart", **changes: Any) -> None:
    """Twelve measured cells of one sweep, with its plan."""
    cells = quickstart_cells()
    write_plan(store, cells, sweep=sweep)
    for name, resolved in cells:
        record_run(store, Recorded(resolved, cell=name, sweep=sweep, **changes))
