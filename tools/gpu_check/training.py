"""Short training runs in forked ranks, for every part that compares or measures them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from bench.errors import UnsupportedError
from bench.launch.command import SHARED_DEVICE
from bench.resolve.machine import Machine
from bench.resolve.resolution import resolve
from bench.spec import ResolvedRun, RunSpec
from bench.testing.workers import ForkServer, Workers
from bench.worker.runtime_report import nccl_version
from tools.gpu_check.record import ROOT, SHARES_DEVICE, Device, PartFindings
from tools.gpu_check.trained import Trained, train

_SECONDS = 200.0


@contextmanager
def ranks(device: Device, count: int) -> Iterator[Workers]:
    """Up to `count` forked ranks."""
    if device == "cuda" and _per_device(count) > 1:
        os.environ.update(SHARED_DEVICE)
    with (
        ForkServer(
            device,
            (str(ROOT),),
            ("tools.gpu_check.trained", "tools.gpu_check.timed"),
        ) as server,
        server.workers(count) as workers,
    ):
        yield workers


def run(
    workers: Workers, spec: dict[str, Any], findings: PartFindings, name: str
) -> list[Trained] | None:
    """Train as `spec` says, on its ranks; None, with the reason in `findings`, where it cannot."""
    resolved = asked(spec, findings, name)
    if resolved is None:
        return None
    document = resolved.model_dump(mode="json")
    count = resolved.launch.ranks
    trained: list[Trained] = workers.run(train, document, seconds=_SECONDS, ranks=count)
    return trained


def asked(spec: dict[str, Any], findings: PartFindings, name: str) -> ResolvedRun | None:
    """The run that `spec` means; None, with the reason in `findings`, where it cannot start."""
    try:
        return resolve(RunSpec.model_validate(spec), Machine.detect())
    except UnsupportedError as refusal:
        findings.note(name, "skipped", f"{refusal.rule}: {refusal.reason}")
        return None


def rank_count(device: Device) -> int:
    """Two CPU ranks; one on each of several CUDA devices, or two on one, where NCCL can."""
    if device == "cpu":
        return 2
    devices = torch.cuda.device_count()
    return devices if devices > 1 or not os.environ.get(SHARES_DEVICE) else 2


def small_run(device: Device, engine: dict[str, Any], **train: Any) -> dict[str, Any]:
    """A spec of the smallest model in FP32; `single` consumes the batch of all ranks."""
    count = rank_count(device)
    alone = engine["name"] == "single"
    return {
        "model": {"preset": "debug"},
        "data": {"kind": "markov"},
        "engine": engine,
        "train": {"steps": 4, "global_batch": 2 * count, "micro_batch": 1, "seq_len": 16} | train,
        "launch": launch(device, 1 if alone else count),
    }


def launch(device: Device, count: int | None = None) -> dict[str, Any]:
    """The section of a spec for `count` ranks, those of the part if left out."""
    count = rank_count(device) if count is None else count
    per_device = 1 if device == "cpu" else _per_device(count)
    return {"ranks": count, "device": device, "ranks_per_device": per_device}


def _per_device(count: int) -> int:
    return -(-count // max(1, torch.cuda.device_count()))


def note_ranks(device: Device, findings: PartFindings) -> None:
    """Say on how many ranks a part ran: what holds on one has communicated with nobody."""
    count = rank_count(device)
    findings.measurements["ranks"] = count
    findings.measurements["shares_device"] = os.environ.get(SHARES_DEVICE, "")
    findings.on_one_rank = count == 1
    if findings.on_one_rank:
        said = f"one rank: no collective ran; NCCL is {nccl_version('runtime')}"
        findings.note("several ranks", "skipped", said)
