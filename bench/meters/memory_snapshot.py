"""What torch's device allocator did, as JSON: `measure.profile: memory` on CUDA.

torch writes such snapshots as pickles, which run code where they are read. This file holds the same
segments, blocks and events as plain data, with the innermost frames of each.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final, Self

import torch

from bench.meters.memory_profile import PROFILED_STEPS
from bench.spec import ResolvedRun
from bench.store.atomic import write_json_atomically

#: Events of the allocator that are kept, the latest; some 300 bytes each.
MOST_EVENTS: Final = 100_000
_MOST_FRAMES: Final = 8


class MemorySnapshot:
    """Records from its start to `stop`, at the latest behind step `PROFILED_STEPS`."""

    def __init__(self, path: Path, device: torch.device) -> None:
        self._path = path
        self._device = device
        self._running = True
        torch.cuda.memory._record_memory_history(
            enabled="all", context="all", stacks="python", max_entries=MOST_EVENTS, device=device
        )

    @classmethod
    def of(cls, resolved: ResolvedRun, path: Path, device: torch.device) -> Self | None:
        """For a memory profile on CUDA, else None."""
        wanted = resolved.measure.profile == "memory" and device.type == "cuda"
        return cls(path, device) if wanted else None

    def after_step(self, step: int) -> None:
        """Callback of the loop: ends the recording in time."""
        if step == PROFILED_STEPS:
            self.stop()

    def stop(self) -> None:
        """Write the snapshot; later calls do nothing."""
        if not self._running:
            return
        self._running = False
        snapshot = torch.cuda.memory._snapshot(self._device)
        torch.cuda.memory._record_memory_history(enabled=None, device=self._device)
        write_json_atomically(self._path, document(snapshot))


def document(snapshot: dict[str, Any]) -> dict[str, Any]:
    """The snapshot as plain data; addresses stay numbers.

    segments: memory taken from the device, with their blocks. events: per device, what the
    allocator did, in order.
    """
    segments = plain(snapshot.get("segments", []))
    return {
        "schema": 1,
        "reserved_bytes": sum(segment["total_size"] for segment in segments),
        "allocated_bytes": sum(segment["allocated_size"] for segment in segments),
        "segments": segments,
        "events": plain(snapshot.get("device_traces", [])),
    }


def plain(value: Any) -> Any:
    """Dictionaries, lists, texts and numbers; anything else as its text, and few frames of each."""
    if isinstance(value, dict):
        return {
            str(key): plain(one[:_MOST_FRAMES] if key == "frames" else one)
            for key, one in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [plain(one) for one in value]
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)
