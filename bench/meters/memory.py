"""Memory meters that cost microseconds, and the names of the memory ledger.

The ledger (bytes by category) comes from the engine, which knows what its tensors are for; see
`Engine.memory_by_category`.
"""

from __future__ import annotations

import gc
from typing import Final

import psutil
import torch

CATEGORIES: Final = (
    "main_weights",
    "compute_weights",
    "gradients",
    "communication_buffers",
    "optimizer_state",
    "activations",
)
"""main_weights: what the optimizer updates. compute_weights: gathered or cast copies of them, at
most. gradients: what outlives a microbatch. communication_buffers: temporary, at most. activations:
what autograd saves for one microbatch; only a memory profile measures them."""


class MemoryMeter:
    """Reads this process and its device."""

    def __init__(self, device: torch.device) -> None:
        self._process = psutil.Process()
        self._device = device

    def rss_bytes(self) -> int:
        """Resident set of this process, now."""
        return int(self._process.memory_info().rss)

    def end_setup(self) -> dict[str, int] | None:
        """Peaks of the device's allocator so far, which no later peak has in it; None on a CPU.

        Blocks that set-up has left free are given back: steps would have them as reserved.
        """
        if self._device.type != "cuda":
            return None
        counters = {
            "device_setup_peak_bytes": torch.cuda.max_memory_allocated(self._device),
            "device_setup_peak_reserved_bytes": torch.cuda.max_memory_reserved(self._device),
        }
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)
        return counters

    def device_peak_bytes(self) -> int | None:
        """Most that torch's device allocator has had allocated since set-up; None on a CPU."""
        if self._device.type != "cuda":
            return None
        return torch.cuda.max_memory_allocated(self._device)

    def device_allocator(self) -> dict[str, int] | None:
        """What the device allocator holds now, and how often it had to free and try again."""
        if self._device.type != "cuda":
            return None
        stats = torch.cuda.memory_stats(self._device)
        return {
            "allocated_bytes": stats["allocated_bytes.all.current"],
            "reserved_bytes": stats["reserved_bytes.all.current"],
            "allocation_retries": stats["num_alloc_retries"],
        }

    def device_peak_reserved_bytes(self) -> int | None:
        """Most that the device allocator has held since set-up, free blocks included."""
        if self._device.type != "cuda":
            return None
        return torch.cuda.max_memory_reserved(self._device)
