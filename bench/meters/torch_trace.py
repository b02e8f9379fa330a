"""`measure.profile: torch`: a trace of a few steps by torch's profiler, one file per rank."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Self

import torch
from torch.profiler import ProfilerActivity, profile

from bench.derive.exposed import exposed_communication
from bench.engines.protocol import Engine
from bench.meters.ranges import Ranges
from bench.spec import ResolvedRun

#: The last step before those that are traced, and how many those are.
_WARM_UP = 2
_TRACED = 3


class TorchTrace:
    """Traces steps `_WARM_UP + 1` onwards. exposed: by operation, once the trace has ended."""

    def __init__(self, path: Path, device: torch.device, engine: Engine) -> None:
        activities = [ProfilerActivity.CPU]
        if device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        self._path = path
        self._ranges = Ranges(engine)
        self._profile = profile(activities=activities)
        self._running = False
        self.exposed: dict[str, Any] | None = None

    @classmethod
    def of(
        cls, resolved: ResolvedRun, path: Path, device: torch.device, engine: Engine
    ) -> Self | None:
        """None for a run without a trace."""
        return cls(path, device, engine) if resolved.measure.profile == "torch" else None

    def mark(self, name: str) -> None:
        """A part of a step begins."""
        if self._running:
            self._ranges.mark(name)

    def after_step(self, step: int) -> None:
        """Start behind the warm-up, and end when enough steps were traced."""
        self._ranges.end()
        if step == _WARM_UP:
            self._profile.start()
            self._ranges.begin()
            self._running = True
        elif step == _WARM_UP + _TRACED:
            self.stop()

    def stop(self) -> None:
        """Write the trace, if one is running, and derive from it what was exposed."""
        if not self._running:
            return
        self._running = False
        self._ranges.close()
        self._profile.stop()
        self._profile.export_chrome_trace(str(self._path))
        events = json.loads(self._path.read_text(encoding="utf-8"))["traceEvents"]
        self.exposed = {
            operation: {
                "count": found.count,
                "milliseconds": found.microseconds / 1e3,
                "exposed_milliseconds": found.exposed_microseconds / 1e3,
            }
            for operation, found in exposed_communication(events).items()
        }


def communication(trace: TorchTrace | None) -> dict[str, Any]:
    """The entry of `runtime.json`; empty without a trace."""
    return {} if trace is None else {"communication": trace.exposed}
