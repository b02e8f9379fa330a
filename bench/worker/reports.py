"""`runtime.json`: versions and devices as a rank has loaded them; `memory.json`: its memory."""

from __future__ import annotations

import platform
import resource
from typing import Any, Final, Literal

import torch
from torch.nn.attention import SDPBackend

from bench.derive.timeline import peak
from bench.engines.dtypes import TORCH_DTYPES
from bench.engines.protocol import Engine
from bench.loop import MeterCost
from bench.meters.memory import CATEGORIES, MemoryMeter
from bench.meters.memory_profile import MemoryProfile
from bench.meters.memory_timeline import attributed
from bench.record import MemoryTimeline
from bench.spec import ResolvedRun
from bench.worker.rank_process import RankProcess, backend

_TOKENS: Final = 128


def runtime_report(
    engine: Engine, resolved: ResolvedRun, process: RankProcess, cost: MeterCost | None = None
) -> dict[str, Any]:
    """Facts of this process; `meters` (their cost over the whole run) once the run has ended.

    gathered_bytes: sent by this rank in gathers of weights so far, by dtype on the wire.
    buffer_registration: what NCCL has registered, group by group, and why not more. transports:
    what carries the bytes of each group, where the engine chooses that itself. attention_kernel:
    what torch takes for this model's attention, as `flash_attention`; None without one.
    """
    report: dict[str, Any] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "nccl": nccl_version("runtime") if "nccl" in (backend(resolved) or "") else None,
        "nccl_compiled": nccl_version("build"),
        "backend": backend(resolved),
        "ranks": process.ranks,
        "threads_per_rank": torch.get_num_threads(),
        "device_names": _device_names(process.device),
        "attention_kernel": attention_kernel(resolved, process.device),
        "engine": resolved.engine.name,
        "engine_code_path": engine.code_path(),
        # An engine of others may have been written before these methods were.
        "gathered_bytes": getattr(engine, "gathered_bytes", lambda: None)(),
        "buffer_registration": getattr(engine, "buffer_registration", lambda: None)(),
        "transports": getattr(engine, "transports", lambda: None)(),
    }
    if cost is not None:
        report["meters"] = {
            "fraction_of_step_time": cost.fraction,
            "seconds": cost.seconds,
            "step_seconds": cost.step_seconds,
            "steps": cost.steps,
        }
    return report


def attention_kernel(resolved: ResolvedRun, device: torch.device) -> str | None:
    """By torch's own choice, for a few tokens: it goes by dtype, heads and device."""
    shape, choice = resolved.shape, getattr(torch, "_fused_sdp_choice", None)
    if shape is None or choice is None:
        return None
    dtype = TORCH_DTYPES[resolved.dtypes.compute]
    ways = resolved.engine.tensor_parallel
    query, key = (
        torch.empty(1, heads // ways, _TOKENS, shape.head_dim, dtype=dtype, device=device)
        for heads in (shape.heads, shape.kv_heads)
    )
    query.requires_grad_()
    grouped = shape.heads != shape.kv_heads
    return SDPBackend(choice(query, key, key, is_causal=True, enable_gqa=grouped)).name.lower()


def nccl_version(which: Literal["build", "runtime"]) -> str | None:
    """Version of NCCL as `2.27.3`: the one torch was compiled with, or the library it has loaded.

    They differ where LD_PRELOAD or another package brings a library of its own. None where torch
    has no NCCL, or is too old to say.
    """
    group = getattr(torch.distributed, "ProcessGroupNCCL", None)
    ask = getattr(group, f"get_{which}_nccl_version", None)
    return None if ask is None else ".".join(str(part) for part in ask())


def _device_names(device: torch.device) -> list[str]:
    """Names of the CUDA devices of this host; empty on a CPU."""
    if device.type != "cuda":
        return []
    return [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]


def memory_report(
    engine: Engine,
    process: RankProcess,
    profile: MemoryProfile | None,
    timeline: MemoryTimeline | None = None,
) -> dict[str, Any]:
    """Bytes by category, null where one is held and not reported, and the peaks of the allocators.

    `pool_plan`: buckets, padding and pools as the engine planned them, null where it does not say.
    `ledger`: the most that was held at one moment of that step, and by which categories; null
    without a ledger. `timeline`: the step, change by change (`bench.record.MemoryTimeline`).
    `cpu_allocator_peak_bytes` (with set-up), `cpu_allocator_steps_peak_bytes` (without) and the
    category `activations` exist in memory profiles only. Peaks of a device are those of the steps;
    `device_setup_peak_bytes` and `device_setup_peak_reserved_bytes` join them from the loop.
    """
    by_category = dict(engine.memory_by_category())
    if profile is not None and profile.activations is not None:
        by_category["activations"] = profile.activations.peak_bytes
    meter, ledger = MemoryMeter(process.device), None
    if timeline is not None:
        timeline = attributed(timeline, by_category)
        moment = peak(timeline).moment
        held = {
            category: size for category in CATEGORIES if (size := moment.by_category.get(category))
        }
        ledger = {
            "step": timeline.step,
            "peak_bytes": moment.total_bytes,
            "by_category_bytes": held,
        }
    return {
        "rank": process.rank,
        "by_category_bytes": {
            name: by_category[name] for name in CATEGORIES if name in by_category
        },
        "ledger": ledger,
        "cpu_allocator_peak_bytes": profile and profile.allocator_peak_bytes,
        "cpu_allocator_steps_peak_bytes": profile and profile.steps_peak_bytes,
        "device_peak_bytes": meter.device_peak_bytes(),
        "device_peak_reserved_bytes": meter.device_peak_reserved_bytes(),
        "pool_plan": engine.pool_plan(),
        "timeline": None if timeline is None else timeline.model_dump(mode="json"),
        "rss_peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }
