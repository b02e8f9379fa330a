"""Named ranges of a step, for torch's profiler and, where there is one, for NVIDIA's tools.

    microbatch N, clip, update                      one after the other, of any engine
    forward UNIT, recompute UNIT, backward UNIT     of engines that tell (`annotated`)
    COLLECTIVE of BUCKET                            of such engines, from its issue to its wait

NVTX comes from the package `nvtx`, which does nothing where no tool listens. Collectives are in
NVTX alone, as ranges of the process, since they may end on another thread; torch's profiler shows
their kernels.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import nvtx
from torch.profiler import record_function

from bench.engines.protocol import Engine

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
        return None, _start(name)

    def _begin_recorded(self, name: str) -> Any:
        recorded = record_function(f"{_DOMAIN}: {name}")
        recorded.__enter__()
        return recorded, _start(name)

    def _end_one(self, handle: Any) -> None:
        recorded, handle_in_nvtx = handle
        nvtx.end_range(handle_in_nvtx)
        if recorded is not None:
            recorded.__exit__(None, None, None)


def _start(name: str) -> Any:
    return nvtx.start_range(message=name, domain=_DOMAIN)
