"""`memory.json`: what rank 0 knows about its memory at the end of a run."""

from __future__ import annotations

import resource
import sys
from typing import Any

from bench.derive.timeline import attributed, peak
from bench.engines.protocol import Engine
from bench.meters.memory import CATEGORIES, MemoryMeter
from bench.meters.memory_profile import MemoryProfile
from bench.record import MemoryTimeline
from bench.worker.rank_process import RankProcess


def memory_report(
    engine: Engine,
    process: RankProcess,
    profile: MemoryProfile | None,
    timeline: MemoryTimeline | None = None,
) -> dict[str, Any]:
    """Bytes by category, null where one is held and not told, and the peaks of the allocators.

    `pool_plan`: buckets, padding and pools as the engine planned them, null where it does not say.
    `ledger`: the most that was held at one moment of that step, and by which categories; null
    without a ledger. `timeline`: the step, change by change (`bench.record.MemoryTimeline`).
    `cpu_allocator_peak_bytes` (with set-up), `cpu_allocator_steps_peak_bytes` (without) and the
    category `activations` exist in memory profiles only. Peaks of a device are those of the steps;
    `device_setup_peak_bytes` and `device_setup_peak_reserved_bytes` join them from the loop.
    """
    by_category = dict(engine.memory_by_category())
    peak = profile.activations_peak_bytes if profile is not None else None
    if peak is not None:
        by_category["activations"] = peak
    meter = MemoryMeter(process.device)
    return {
        "rank": process.rank,
        "by_category_bytes": {
            name: by_category[name] for name in CATEGORIES if name in by_category
        },
        "ledger": None if timeline is None else _ledger_peak(attributed(timeline, by_category)),
        "cpu_allocator_peak_bytes": profile.allocator_peak_bytes if profile is not None else None,
        "cpu_allocator_steps_peak_bytes": profile.steps_peak_bytes if profile is not None else None,
        "device_peak_bytes": meter.device_peak_bytes(),
        "device_peak_reserved_bytes": meter.device_peak_reserved_bytes(),
        "pool_plan": engine.pool_plan(),
        "timeline": None if timeline is None else timeline.model_dump(mode="json"),
        "rss_peak_bytes": _rss_peak_bytes(),
    }


def _ledger_peak(timeline: MemoryTimeline) -> dict[str, Any]:
    moment = peak(timeline).moment
    return {
        "step": timeline.step,
        "peak_bytes": moment.total_bytes,
        "by_category_bytes": {
            name: moment.by_category[name] for name in CATEGORIES if moment.by_category.get(name)
        },
    }


def _rss_peak_bytes() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # Linux counts in KiB, macOS in bytes.
    return peak if sys.platform == "darwin" else peak * 1024
