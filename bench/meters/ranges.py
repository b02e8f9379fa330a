"""Named ranges of a step, for torch's profiler and, where there is one, for NVIDIA's tools.

    microbatch N, clip, update                      one after the other, of any engine
    forward UNIT, recompute UNIT, backward UNIT     of engines that tell (`annotated`)
    COLLECTIVE of BUCKET                            of such engines, from its issue to its wait

NVTX comes from the package `nvtx`, else from torch, else there is none. Collectives are in NVTX
alone, as ranges of the process, since they may end on another thread; torch's profiler shows their
kernels.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch.profiler import record_function

from bench.engines.protocol import Engine

_DOMAIN = "mfsdp-bench"
_OF_UNITS = ("forward ", "recompute ", "backward ")


class Ranges:
    """`mark` ends the range before; those of the engine come and go by themselves."""

    def __init__(self, engine: Engine | None = None) -> None:
        self._engine = engine
        self._open: Any = None
        self._start, self._stop = nvtx_calls()
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
        return None, self._start(name)

    def _begin_recorded(self, name: str) -> Any:
        recorded = record_function(f"{_DOMAIN}: {name}")
        recorded.__enter__()
        return recorded, self._start(name)

    def _end_one(self, handle: Any) -> None:
        recorded, nvtx = handle
        self._stop(nvtx)
        if recorded is not None:
            recorded.__exit__(None, None, None)


def nvtx_calls() -> tuple[Callable[[str], Any], Callable[[Any], object]]:
    """How to start an NVTX range here, and how to end what that gave."""
    if importlib.util.find_spec("nvtx") is not None:
        nvtx: Any = importlib.import_module("nvtx")
        return (lambda name: nvtx.start_range(message=name, domain=_DOMAIN)), nvtx.end_range
    if torch.cuda.is_available():
        return torch.cuda.nvtx.range_start, torch.cuda.nvtx.range_end
    return (lambda _name: None), (lambda _handle: None)
