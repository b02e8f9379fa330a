"""Memory profile of the first steps of a run: allocator peak on a CPU, and saved activations.

Only runs with measure.profile = memory pay for it, and their times do not count.
"""

from __future__ import annotations

import ctypes
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final, Self

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

from bench.meters.saved_activations import SavedActivations
from bench.spec import ResolvedRun

PROFILED_STEPS: Final = 3
"""The first step builds optimizer state; the second and third are ordinary ones."""

_STEPS_BEGIN: Final = "mfsdp_bench: set-up is over"


class MemoryProfile:
    """Start before the model is built, `watch` the model; it ends after PROFILED_STEPS.

    torch's CPU allocator keeps no statistics of its own, so its peak is summed up from the
    profiler's events, which see the allocations of every torch operator of this process. A device
    allocator keeps its own peak, and the profiler stays off.

    allocator_peak_bytes: with set-up; steps_peak_bytes: from `watch` on, what set-up left included.
    activations: the account of saved tensors; None before `watch`.
    """

    def __init__(self, device: torch.device, steps: int = PROFILED_STEPS) -> None:
        self._last_step = min(PROFILED_STEPS, steps)
        self._profile: profile | None = None
        self._follows = ExitStack()
        self.activations: SavedActivations | None = None
        self.allocator_peak_bytes: int | None = None
        self.steps_peak_bytes: int | None = None
        if device.type == "cpu":
            _count_frees_of_all_threads()
            self._profile = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
            self._profile.start()

    @classmethod
    def of(cls, resolved: ResolvedRun, device: torch.device) -> Self | None:
        """None for a run without a memory profile."""
        if resolved.measure.profile != "memory":
            return None
        return cls(device, resolved.train.steps)

    def watch(self, model: nn.Module) -> None:
        """Follow what autograd saves from now on; `model` says which storages are weights."""
        self.activations = self._follows.enter_context(SavedActivations(model))
        with record_function(_STEPS_BEGIN):
            pass

    def after_step(self, step: int) -> None:
        """Callback of the loop: ends the recording in time."""
        if step == self._last_step:
            self.stop()

    def stop(self) -> None:
        """End the recording; later calls do nothing."""
        self._follows.close()
        if self._profile is not None:
            recorded, self._profile = self._profile, None
            recorded.stop()
            self.allocator_peak_bytes, self.steps_peak_bytes = _peaks(recorded)


def _count_frees_of_all_threads() -> None:
    """[Note: frees of other threads] Have torch's CPU allocator count in every thread.

    The profiler sees threads that it was started in. Where a thread of gloo's is the last to hold
    a gathered buffer, its free is in no event, and a sum of events grows: by 984,064 bytes with
    each of up to ten of 30 gathers of FSDP2, none to ten from run to run. The allocator's own
    total, which each event carries, is right once it counts all threads. torch has no public
    switch for that. Without it, as in a torch that has renamed it, that total is the sum.
    """
    path = Path(torch.__file__).parent / "lib" / "libc10.so"
    try:
        flag = ctypes.c_bool.in_dll(ctypes.CDLL(str(path)), "FLAGS_caffe2_report_cpu_memory_usage")
    except (OSError, ValueError):
        return
    flag.value = True


def _peaks(recorded: profile) -> tuple[int, int | None]:
    """The most bytes that the allocator held: since the profile began, and since steps began."""
    # torch has no public reader for these events but the trace file that it writes from them.
    inner: Any = recorded.profiler
    changes: list[tuple[int, int, int, int]] = []
    begin: int | None = None
    waiting = list(inner.kineto_results.experimental_event_tree())
    while waiting:
        event = waiting.pop()
        waiting += event.children
        fields = event.extra_fields
        if not hasattr(fields, "total_allocated"):
            begin = event.start_time_ns if event.name == _STEPS_BEGIN else begin
        elif fields.device.type == "cpu":
            change = (event.start_time_ns, fields.total_allocated, fields.alloc_size, fields.ptr)
            changes.append(change)
    changes.sort()
    # What an earlier profile of this process counted, until it is freed.
    before = changes[0][1] - changes[0][2] if changes else 0
    peak = held = steps_peak = 0
    ours: set[int] = set()
    for at, total, size, address in changes:
        if size > 0:
            ours.add(address)
        elif address not in ours:
            before += size
        if begin is not None and at > begin:
            steps_peak = max(steps_peak, held, total - before)
        held = total - before
        peak = max(peak, held)
    return peak, None if begin is None else max(steps_peak, held)
