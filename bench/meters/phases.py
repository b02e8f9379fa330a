"""How long the parts of a step took: by the device's own events on CUDA, by the clock elsewhere.

Nothing waits inside of a step. An event is recorded where a part begins, on the stream that the
part is enqueued on, and read after the loss has reached the host, when the device has passed it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Any

import torch
from torch import nn


def cuda_event() -> torch.cuda.Event:
    """When the device comes to what is enqueued next on the current stream."""
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


class PhaseMeter:
    """Parts of one step at a time: `begin`, `mark` per part, `end`, then `milliseconds`.

    event: of a device, notes a point in the order of what is enqueued, which tells by
    `elapsed_time(later)` once the device has passed both; None where the host computes.
    host_milliseconds: from `begin` until the host had enqueued the step; None where it computes the
    step itself.
    """

    def __init__(self, event: Callable[[], Any] | None) -> None:
        self._event = event
        self._notes: list[tuple[str, Any]] = []
        self._running = False
        self._began = 0.0
        self.host_milliseconds: float | None = None

    @classmethod
    def of(cls, device: torch.device) -> PhaseMeter:
        """For what is computed on `device`."""
        return cls(cuda_event if device.type == "cuda" else None)

    def watch(self, model: nn.Module) -> None:
        """Mark forward and backward passes through `model`, which the engine has been given."""

        def forward(*_: Any) -> None:
            self.mark("forward")

        def backward(*_: Any) -> None:
            self.mark("backward")

        # First of all hooks and last of all, so that an engine's own are counted in.
        model.register_forward_pre_hook(forward, prepend=True)
        model.register_forward_hook(backward)

    def begin(self) -> None:
        """A step begins."""
        self._notes.clear()
        self._running = True
        self._began = perf_counter()

    def mark(self, name: str) -> None:
        """A part begins, and the one before it ends."""
        if self._running:
            self._notes.append((name, perf_counter() if self._event is None else self._event()))

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What is inside is one part: an event that a graph captures tells no time."""
        self._running = False
        try:
            yield
        finally:
            self._running = True

    def end(self) -> None:
        """Everything is enqueued."""
        self.mark("")
        self._running = False
        if self._event is not None:
            self.host_milliseconds = (perf_counter() - self._began) * 1e3

    def milliseconds(self) -> dict[str, float]:
        """By part, those of the same name added up. Only once the device has done the step."""
        phases: dict[str, float] = {}
        for (name, start), (_, end) in zip(self._notes, self._notes[1:], strict=False):
            time = (end - start) * 1e3 if self._event is None else start.elapsed_time(end)
            phases[name] = phases.get(name, 0.0) + time
        return {name: round(time, 4) for name, time in phases.items()}
