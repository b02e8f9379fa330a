"""Memory profile of the first steps of a run: allocator peak on a CPU, and saved activations.

Only runs with measure.profile = memory pay for it, and their times do not count.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import nn
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from bench.meters.saved_activations import SavedActivations

PROFILED_STEPS: Final = 3
"""The first step builds optimizer state; the second and third are ordinary ones."""


class MemoryProfile:
    """Start before the model is built, `watch` the model, `stop` after PROFILED_STEPS.

    torch's CPU allocator keeps no statistics of its own, so its peak is summed up from the
    profiler's events, which see the allocations of every torch operator of this process. A device
    allocator keeps its own peak, and the profiler stays off.
    """

    def __init__(self, device: torch.device) -> None:
        self._profile: profile | None = None
        self._activations: SavedActivations | None = None
        self.allocator_peak_bytes: int | None = None
        if device.type == "cpu":
            self._profile = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
            self._profile.start()

    def watch(self, model: nn.Module) -> None:
        """Follow what autograd saves from now on; `model` says which storages are weights."""
        self._activations = SavedActivations(model)
        self._activations.__enter__()

    @property
    def activations(self) -> SavedActivations | None:
        """The account of saved tensors; None before `watch`."""
        return self._activations

    def after_step(self, step: int) -> None:
        """Callback of the loop: ends the recording in time."""
        if step == PROFILED_STEPS:
            self.stop()

    def stop(self) -> None:
        """End the recording; later calls do nothing."""
        if self._activations is not None:
            self._activations.__exit__(None, None, None)
        if self._profile is not None:
            recorded, self._profile = self._profile, None
            recorded.stop()
            self.allocator_peak_bytes = peak_of_changes(_allocator_changes(recorded))

    @property
    def activations_peak_bytes(self) -> int | None:
        """Most that autograd kept at once; None if no model was watched."""
        return None if self._activations is None else self._activations.peak_bytes


def _allocator_changes(recorded: profile) -> list[tuple[int, int]]:
    """(nanosecond, bytes allocated or, negative, freed) of every CPU allocator event."""
    # torch has no public reader for these events but the trace file that it writes from them.
    inner: Any = recorded.profiler
    return [
        (event.start_ns(), event.nbytes())
        for event in inner.kineto_results.events()
        if event.name() == "[memory]" and event.device_type() == DeviceType.CPU
    ]


def peak_of_changes(changes: list[tuple[int, int]]) -> int:
    """Largest running sum of byte changes in time order; never below zero."""
    peak = alive = 0
    for _, change in sorted(changes, key=lambda pair: pair[0]):
        alive += change
        peak = max(peak, alive)
    return peak
