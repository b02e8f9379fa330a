"""`measure.profile: torch`: a trace of a few steps by torch's profiler, one file per rank.

It names ranges of a step, for that profiler and, where there is one, for NVIDIA's tools.
`measure.nvtx: true` names them in every step without that profiler: a process has one CUPTI client.

    microbatch N, clip, update                      one after the other, of any engine
    forward UNIT, recompute UNIT, backward UNIT     of engines that tell (`annotated`)
    COLLECTIVE of BUCKET                            of such engines, from its issue to its wait

NVTX comes from the package `nvtx`, which does nothing where no tool listens. Collectives are in
NVTX alone, as ranges of the process, since they may end on another thread; torch's profiler shows
their kernels.
"""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import nvtx
import torch
from torch.profiler import ProfilerActivity, profile, record_function

from bench.derive.exposed import exposed_communication
from bench.engines.protocol import Engine
from bench.spec import ResolvedRun

_DOMAIN = "mfsdp-bench"
_OF_UNITS = ("forward ", "recompute ", "backward ")


class Ranges:
    """`mark` ends the range before; those of the engine come and go by themselves."""

    def __init__(self, engine: Engine | None = None) -> None:
        self._engine = engine
        self._open: Any = None
        self._stack = ExitStack()

    def begin(self) -> None:
        """Listen to the engine, if it tells of its units."""
        annotated = getattr(self._engine, "annotated", None)
        if annotated is not None:
            self._stack.enter_context(annotated(self._begin_one, self._end_one))

    def mark(self, name: str) -> None:
        """A range begins, and the one before it ends."""
        self.end()
        self._open = self._begin_recorded(name)

    def end(self) -> None:
        """End the range that is open, if one is."""
        if self._open is not None:
            self._end_one(self._open)
            self._open = None

    def close(self) -> None:
        """End all of them."""
        self.end()
        self._stack.close()

    def _begin_one(self, name: str) -> Any:
        if name.startswith(_OF_UNITS):
            return self._begin_recorded(name)
        return None, nvtx.start_range(message=name, domain=_DOMAIN)

    def _begin_recorded(self, name: str) -> Any:
        recorded = record_function(f"{_DOMAIN}: {name}")
        recorded.__enter__()
        return recorded, nvtx.start_range(message=name, domain=_DOMAIN)

    def _end_one(self, handle: Any) -> None:
        recorded, handle_in_nvtx = handle
        nvtx.end_range(handle_in_nvtx)
        if recorded is not None:
            recorded.__exit__(None, None, None)


#: The last step before those that are traced, and how many those are.
_WARM_UP = 2
_TRACED = 3


class NvtxRanges:
    """Names the parts of all steps, for a tool that listens."""

    exposed = None

    def __init__(self, engine: Engine, steps: int) -> None:
        self._ranges = Ranges(engine)
        self._ranges.begin()
        self._last_step = steps

    def on_phase(self, name: str) -> None:
        """A part of a step begins."""
        self._ranges.mark(name)

    def after_step(self, step: int) -> None:
        """End the part that is open, and behind the last step all."""
        if step == self._last_step:
            self._ranges.close()
        self._ranges.end()


class TorchTrace:
    """Traces steps `_WARM_UP + 1` onwards. exposed: by operation, once the trace has ended."""

    def __init__(self, path: Path, device: torch.device, engine: Engine, steps: int) -> None:
        activities = [ProfilerActivity.CPU]
        if device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        self._path = path
        self._last_step = min(_WARM_UP + _TRACED, steps)
        self._ranges = Ranges(engine)
        self._profile = profile(activities=activities)
        self._running = False
        self.exposed: dict[str, Any] | None = None

    @classmethod
    def of(
        cls, resolved: ResolvedRun, path: Path, device: torch.device, engine: Engine
    ) -> Self | NvtxRanges | None:
        """None for a run without named ranges."""
        if resolved.measure.profile == "torch":
            return cls(path, device, engine, resolved.train.steps)
        return NvtxRanges(engine, resolved.train.steps) if resolved.measure.nvtx else None

    def on_phase(self, name: str) -> None:
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
        if step == self._last_step and self._running:
            self._write()

    def _write(self) -> None:
        """The trace, and what was exposed in it."""
        self._running = False
        self._ranges.close()
        self._profile.stop()
        self._profile.export_chrome_trace(str(self._path))
        events = json.loads(self._path.read_text(encoding="utf-8"))["traceEvents"]
        self.exposed = {
            operation: {
                "count": exposure.count,
                "milliseconds": exposure.microseconds / 1e3,
                "exposed_milliseconds": exposure.exposed_microseconds / 1e3,
            }
            for operation, exposure in exposed_communication(events).items()
        }
