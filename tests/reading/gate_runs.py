"""Sweeps with two arms, recorded without being run: times, memory, bytes and losses as wanted."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from recorded_runs import environment, ledger, resolved_run
from stand_in_runs import append_samples

from bench.record import StepSample
from bench.spec import ResolvedRun
from bench.store import ResultsStore


@dataclass
class Arm:
    """How the runs of one arm differ from the plain ones. `states`: by block, default ok."""

    slower: float = 1.0
    more_memory: float = 1.0
    more_bytes: float = 1.0
    loss_shift: float = 0.0
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
    write_gate_plan(store, [a for a in arms if a], sweep, cells, first_block + blocks)
    rng = random.Random(seed)
    for block in range(first_block, first_block + blocks):
        for cell, resolved in cells.items():
            for name, arm in arms.items():
                level = 100.0 * arm.slower * rng.gauss(1.0, noise)
                attempt = 1 if interleaved and name else None
                _record(store, resolved, arm, level, rng, (sweep, cell, name, block, attempt))


def _record(
    store: ResultsStore,
    resolved: ResolvedRun,
    arm: Arm,
    level: float,
    rng: random.Random,
    place: tuple[str, str, str | None, int, int | None],
) -> None:
    sweep, cell, name, block, attempt = place
    state = (arm.states or {}).get(block, "ok")
    with store.new_run(
        resolved,
        sweep=sweep,
        cell=cell,
        repeat=block,
        arm=name,
        attempt=attempt,
        code=arm.code,
    ) as folder:
        folder.write_environment({**environment(), **(arm.hardware or {})})
        cpu = None
        if arm.cpu_noise is not None:
            cpu = {"main": 60 * arm.slower * rng.gauss(1, arm.cpu_noise), "transport": 5.0}
        for rank in range(resolved.launch.ranks):
            samples = []
            for step in range(1, resolved.train.steps + 1):
                slow = {1: 4.0, 2: 1.5}.get(step, 1.0)
                drift = 1.0 if arm.steady else 1.0 + 0.1 * step
                loss = (2.0 + 3.0 * 0.9**step) * (1 + arm.loss_shift)
                samples.append(
                    StepSample(
                        step=step,
                        milliseconds=level * slow * drift * rng.gauss(1.0, 0.004),
                        loss=loss,
                        grad_norm=1.0,
                        learning_rate=1e-3,
                        tokens=resolved.tokens_per_step // resolved.launch.ranks,
                        wire_bytes=int(1_000_000 * arm.more_bytes),
                        rss_bytes=400_000_000,
                        cpu_milliseconds=cpu,
                    )
                )
            append_samples(folder, rank, *samples)
        sizes = {k: int(v * arm.more_memory) for k, v in ledger(resolved).items()}
        (folder.path / "memory.json").write_text(
            json.dumps({"rank": 0, "by_category_bytes": sizes, "live": arm.live})
        )
        if arm.counts is not None:
            (folder.path / "counts.json").write_text(json.dumps(arm.counts))
        status = folder.status.model_copy(
            update={
                "state": state,
                "reason": "as the test wants" if state != "ok" else "",
            }
        )
        folder.write_status(status)


def write_gate_plan(
    store: ResultsStore,
    arms: list[str],
    sweep: str,
    cells: Mapping[str, ResolvedRun],
    repeats: int,
) -> None:
    store.write_plan(
        sweep,
        {
            "plan_version": 1,
            "id": sweep,
            "name": sweep,
            "description": "",
            "source": f"{sweep}.yaml",
            "set": {},
            "interleaved": bool(arms),
            "seed": 1,
            "arms": [
                {
                    "name": arm,
                    "description": "working tree",
                    "commit": None,
                    "dirty_hash": None,
                    "torch": "2.13.0",
                    "python": "3.11",
                    "packages": {},
                    "codes": {},
                }
                for arm in arms
            ],
            "cells": [
                {
                    "id": name,
                    "labels": {},
                    "repeats": repeats,
                    "config_hash": resolved.config_hash,
                    "slug": resolved.slug,
                    "resolved": resolved.model_dump(mode="json"),
                }
                for name, resolved in cells.items()
            ],
            "pruned": [
                {"id": "cuda", "labels": {}, "rule": "too-few-devices", "reason": "needs 8 GPUs"}
            ],
            "duplicates": [],
        },
    )
