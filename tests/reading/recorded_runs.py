"""A results folder filled through `bench.store` with runs that never ran, damaged at will.

Times, losses and memory follow simple rules per engine, strategy and dtype, with seeded noise.
`in_memory` makes a record without files, `recorded_cell` a cell, `findings_of` what a report finds,
`record_arms` a sweep of blocks and `judged_arms` what a gate says of it.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from stand_in_runs import append_samples

from bench.record import RunRecord, RunStatus, StepSample
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
from bench.store import ResultsStore, RunFolder
from bench.store.atomic import write_json_atomically
from bench.store.digest import with_digest
from bench.store.layout import RUNTIME
from reports.compare.judge import Verdicts, judge
from reports.compare.policy import Policy
from reports.compare.samples import CellSamples
from reports.compare.sides import Pair, sides_of_arms
from reports.findings import Findings, find
from reports.renderers.document import Paragraph
from reports.sections.what_ran import what_ran
from reports.views.cells import Cell, make_cell
from reports.views.sweep_view import load_sweeps

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
    """What `record_run` writes, each replaceable. samples: of a rank and step, in the place of the
    rules. memory: else the ledger, of runs that finished. started: None for now.
    """

    resolved: ResolvedRun
    cell: str | None = None
    sweep: str | None = "quickstart"
    state: str = "ok"
    reason: str = ""
    repeat: int = 0
    arm: str | None = None
    attempt: int | None = None
    code: str = "code-1"
    steps: int | None = None
    speed: float = 1.0
    loss_shift: float = 0.0
    norm_scale: float = 1.0
    noise: float = 1.0
    seed: int = 0
    started: str | None = "2026-03-01T10:00:00.000Z"
    environment: Mapping[str, Any] = field(default_factory=dict)
    milliseconds: Callable[[int], float] | None = None
    samples: Callable[[int, int], StepSample] | None = None
    memory: Mapping[str, Any] | None = None
    counts: Mapping[str, Any] | None = None


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
    names = ("sweep", "cell", "repeat", "arm", "attempt", "code")
    with store.new_run(resolved, **{name: getattr(run, name) for name in names}) as folder:
        described = {**environment(), **run.environment}
        write_json_atomically(folder.path / RUNTIME, described.pop("runtime"))
        folder.write_environment(described)
        count = resolved.train.steps if run.steps is None else run.steps
        for rank in range(resolved.launch.ranks):
            if run.samples is None:
                write_samples(folder, run, rank, count)
            else:
                append_samples(folder, rank, *(run.samples(rank, n + 1) for n in range(count)))
        memory = run.memory
        if memory is None and run.state == "ok":
            memory = {"rank": 0, "by_category_bytes": ledger(resolved)}
        if memory is not None:
            (folder.path / "memory.json").write_text(json.dumps(memory))
        if run.counts is not None:
            (folder.path / "counts.json").write_text(json.dumps(run.counts))
        started = run.started or folder.status.started_utc
        ended = {"started_utc": started, "ended_utc": started.replace("10:00", "10:01")}
        changes = {"state": run.state, "reason": run.reason, **ended}
        status = folder.status.model_copy(update=changes)
        folder.finish(status)
    return folder


def held(peak: float, live: int, *, is_bound: bool = False) -> dict:
    """A `memory.json`: the peak of the ledger, of one moment or a bound, and live storage."""
    categories = {"main_weights": int(peak * 2**20), "gradients": 0}
    moment = {"step": 2, "peak_bytes": int(peak * 2**20), "by_category_bytes": categories}
    live_of_ranks = {"step": 20, "bytes": [live * 2**20] * 2}
    document = {"rank": 0, "by_category_bytes": categories, "live": live_of_ranks}
    return document if is_bound else document | {"ledger": moment}


def keep_changes(store: ResultsStore) -> None:
    """Give every run the digest of its files as they are now: a test has changed them."""
    for file in (store.root / "runs").glob("*/*/status.json"):
        write_json_atomically(file, with_digest(file, json.loads(file.read_text())))


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
            grad_norm=1.4 * 0.97**step * run.norm_scale,
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
    arms: Iterable[str] = (),
    repeats: int = 1,
    **more: Any,
) -> None:
    """`more`: further entries of the plan, or others in the place of these."""
    arms = [
        {"name": arm, "description": "working tree", "commit": None, "dirty_hash": None}
        | {"torch": "2.13.0", "python": "3.11", "packages": {}, "codes": {}}
        for arm in arms
    ]
    planned = [
        {"id": name, "labels": {}, "repeats": repeats, "config_hash": resolved.config_hash}
        | {"slug": resolved.slug, "resolved": resolved.model_dump(mode="json")}
        for name, resolved in cells
    ]
    document = {
        "plan_version": 1,
        "id": sweep,
        "name": sweep,
        "description": "Engines and sharding strategies in two dtype policies",
        "source": f"sweeps/{sweep}.yaml",
        "set": {},
        "interleaved": bool(arms),
        "seed": 1,
        "arms": arms,
        "cells": planned,
        "pruned": [],
        "duplicates": [],
    }
    store.write_plan(sweep, document | more)


def quickstart_cells() -> list[tuple[str, ResolvedRun]]:
    engines = [
        ("ddp", "no_shard"),
        ("fsdp2", "optim_grads_params"),
        *(("mfsdp", s) for s in MEMORY),
    ]
    return [
        (
            f"{engine}-{strategy}-{dtype}" if engine == "mfsdp" else f"{engine}-{dtype}",
            resolved_run(engine, strategy, dtype=dtype, comm=dtype),
        )
        for engine, strategy in engines
        for dtype in ("fp32", "bf16")
    ]


def fill_quickstart(store: ResultsStore, sweep: str = "quickstart", **changes: Any) -> None:
    """Twelve measured cells of one sweep, with its plan."""
    cells = quickstart_cells()
    write_plan(store, cells, sweep=sweep)
    for name, resolved in cells:
        record_run(store, Recorded(resolved, cell=name, sweep=sweep, **changes))


def recorded_cell(
    store: ResultsStore, name: str, resolved: ResolvedRun, *, runs: int = 1, **changes: Any
) -> Cell:
    """A cell of a sweep of its own name."""
    for repeat in range(runs):
        record_run(store, Recorded(resolved, cell=name, sweep=name, repeat=repeat, **changes))
    return make_cell(name, store.records(sweep=name))


def findings_of(
    store: ResultsStore, cells: Mapping[str, ResolvedRun | Recorded], **plan: Any
) -> Findings:
    """What a report on one sweep finds. cells: by name, what ran. plan: as for `write_plan`."""
    runs = {
        name: one if isinstance(one, Recorded) else Recorded(one) for name, one in cells.items()
    }
    write_plan(store, [(name, run.resolved) for name, run in runs.items()], **plan)
    for name, run in runs.items():
        record_run(store, replace(run, cell=name))
    return find(store, load_sweeps(store, ["quickstart"]))


def logged(resolved: ResolvedRun) -> ResolvedRun:
    """The same run, for as few steps as it takes to keep a log of NCCL."""
    train = resolved.train.model_copy(update={"steps": 5})
    measure = resolved.measure.model_copy(update={"nccl": "evidence"})
    return resolved.model_copy(update={"train": train, "measure": measure})


def found_with_log(
    store: ResultsStore, cells: Mapping[str, Recorded], lines: Iterable[str]
) -> Findings:
    """`findings_of`, where the cell `logged` has a log of NCCL 2.29.3 with these lines."""
    findings_of(store, cells)
    for record in store.records():
        if record.status.cell == "logged":
            folder = store.root / "runs" / record.run_id / "nccl"
            folder.mkdir()
            said = ["NCCL version 2.29.3+cuda13.0", *lines]
            text = "".join(f"n1:10:20 [0] NCCL INFO {line}\n" for line in said)
            (folder / "rank0.log").write_text(text)
    return find(store, load_sweeps(store, ["quickstart"]))


def warnings(findings: Findings) -> list[str]:
    """What the first section of a report warns of."""
    return [b.text for b in what_ran(findings) if isinstance(b, Paragraph) and b.tone == "warning"]


def sample(step: int, milliseconds: float = 100.0, **changes: Any) -> StepSample:
    """A step of any run."""
    plain = StepSample(step, milliseconds, 3.0, 1.0, 3e-4, 256, 1000, 500)
    return replace(plain, **changes)


def in_memory(
    steps: Mapping[int, Iterable[StepSample]] | None = None,
    *,
    resolved: ResolvedRun | None = None,
    environment: Mapping[str, Any] | None = None,
    status: RunStatus | None = None,
    **changes: Any,
) -> RunRecord:
    """A record that no folder holds; 20 equal steps of two ranks where nothing else is wanted."""
    if steps is None:
        steps = {rank: [sample(i) for i in range(1, 21)] for rank in range(2)}
    return RunRecord(
        "a/b",
        resolved or resolved_run(),
        status or RunStatus(state="ok"),
        dict(environment or {}),
        {rank: list(samples) for rank, samples in steps.items()},
        **changes,
    )


@dataclass
class Arm:
    """How the runs of one arm differ from the plain ones. `states`: by block, default ok."""

    slower: float = 1.0
    more_memory: float = 1.0
    more_bytes: float = 1.0
    loss_shift: float = 0.0
    norm_scale: float = 1.0
    code: str = "code-1"
    states: Mapping[int, str] | None = None
    hardware: Mapping[str, Any] | None = None
    steady: bool = True
    counts: Mapping[str, Any] | None = None
    live: Mapping[str, Any] | None = None
    cpu_noise: float | None = None


CELLS: dict[str, ResolvedRun] = {
    "ddp": resolved_run("ddp", "no_shard"),
    "zero1": resolved_run("mfsdp", "optim"),
    "zero3": resolved_run("mfsdp", "optim_grads_params"),
}
ONE = {"zero3": CELLS["zero3"]}


def on_nodes(*names: str) -> Arm:
    proofs = {str(rank): {"host": name} for rank, name in enumerate(names)}
    runtime = {"device_names": [], "code_proof": proofs}
    return Arm(hardware={"runtime": runtime, "variables": {"SLURM_JOB_ID": "7"}})


def record_arms(  # noqa: PLR0913 - every way in which a sweep may differ
    store: ResultsStore,
    arms: Mapping[str | None, Arm],
    *,
    sweep: str = "gate",
    blocks: int = 8,
    noise: float = 0.01,
    cells: Mapping[str, ResolvedRun] = CELLS,
    interleaved: bool = True,
    first_block: int = 0,
    seed: int = 0,
) -> None:
    """Write the plan and every run; arm None is a sweep without arms."""
    pruned = {"id": "cuda", "labels": {}, "rule": "too-few-devices", "reason": "needs 8 GPUs"}
    write_plan(
        store,
        cells.items(),
        sweep=sweep,
        arms=[arm for arm in arms if arm],
        repeats=first_block + blocks,
        source=f"{sweep}.yaml",
        pruned=[pruned],
    )
    rng = random.Random(seed)
    for block in range(first_block, first_block + blocks):
        for cell, resolved in cells.items():
            for name, arm in arms.items():
                attempt = 1 if interleaved and name else None
                level = 100.0 * arm.slower * rng.gauss(1.0, noise)
                run = _of_arm(resolved, arm, block, level, rng)
                record_run(store, replace(run, sweep=sweep, cell=cell, arm=name, attempt=attempt))


def _of_arm(
    resolved: ResolvedRun, arm: Arm, block: int, level: float, rng: random.Random
) -> Recorded:
    state = (arm.states or {}).get(block, "ok")
    cpu = None
    if arm.cpu_noise is not None:
        cpu = {"main": 60 * arm.slower * rng.gauss(1, arm.cpu_noise), "transport": 5.0}

    def of_step(_: int, step: int) -> StepSample:
        slow = {1: 4.0, 2: 1.5}.get(step, 1.0) * (1.0 if arm.steady else 1.0 + 0.1 * step)
        return StepSample(
            step=step,
            milliseconds=level * slow * rng.gauss(1.0, 0.004),
            loss=(2.0 + 3.0 * 0.9**step) * (1 + arm.loss_shift),
            grad_norm=arm.norm_scale,
            learning_rate=1e-3,
            tokens=resolved.tokens_per_step // resolved.launch.ranks,
            wire_bytes=int(1_000_000 * arm.more_bytes),
            rss_bytes=400_000_000,
            cpu_milliseconds=cpu,
        )

    sizes = {name: int(size * arm.more_memory) for name, size in ledger(resolved).items()}
    return Recorded(
        resolved,
        state=state,
        reason="as the test wants" if state != "ok" else "",
        repeat=block,
        code=arm.code,
        started=None,
        environment=arm.hardware or {},
        samples=of_step,
        memory={"rank": 0, "by_category_bytes": sizes, "live": arm.live},
        counts=arm.counts,
    )


def interleaved(cell: str, base: Iterable[float], head: Iterable[float], **changes: Any) -> Pair:
    """A pair of which every number is known of blocks 0, 1, ...: times, CPU times and rates."""
    names = ("step_time", "cpu_time", "throughput")
    sides = (
        CellSamples(cell, tokens_per_step=1.0, values={n: dict(enumerate(numbers)) for n in names})
        for numbers in (base, head)
    )
    return Pair(cell, *sides, **{"paired": True, **changes})


def judged_arms(
    store: ResultsStore, policy: Policy | None = None, base: Arm | None = None, **head: Any
) -> Verdicts:
    """A gate on two arms. head: how the second differs, and what `record_arms` may be told."""
    how = {
        name: head.pop(name) for name in ("noise", "blocks", "cells", "interleaved") & head.keys()
    }
    record_arms(store, {"base": base or Arm(), "head": Arm(**head)}, **how)
    return judge(sides_of_arms(store, "gate"), policy)
