"""`runtime.json`: versions and devices as the rank that ran has loaded them, not as installed."""

from __future__ import annotations

import platform
from typing import Any

import torch

from bench.engines.protocol import Engine
from bench.meters.cost import MeterCost
from bench.spec import ResolvedRun
from bench.worker.place import Place, backend


def runtime_report(
    engine: Engine, resolved: ResolvedRun, place: Place, cost: MeterCost | None = None
) -> dict[str, Any]:
    """Facts of this process; `meters` (their cost over the whole run) once the run has ended."""
    report: dict[str, Any] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "nccl": _nccl_version(place.device),
        "backend": backend(resolved),
        "ranks": place.ranks,
        "threads_per_rank": torch.get_num_threads(),
        "device_names": _device_names(place.device),
        "engine": resolved.engine.name,
        "engine_code_path": engine.code_path(),
    }
    if cost is not None:
        report["meters"] = {
            "fraction_of_step_time": cost.fraction,
            "seconds": cost.seconds,
            "step_seconds": cost.step_seconds,
            "steps": cost.steps,
        }
    return report


def _nccl_version(device: torch.device) -> str | None:
    """Version of the loaded library, as `2.27.3`; None where NCCL is not used."""
    if device.type != "cuda" or not torch.cuda.nccl.is_available(torch.empty(0, device=device)):
        return None
    return ".".join(str(part) for part in torch.cuda.nccl.version())


def _device_names(device: torch.device) -> list[str]:
    """Names of the CUDA devices of this host; empty on a CPU."""
    if device.type != "cuda":
        return []
    return [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
