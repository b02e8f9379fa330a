"""Named ranges of a step, for torch's profiler and, where there is one, for NVIDIA's tools.

NVTX comes from the package `nvtx`, else from torch, else there is none.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import record_function

_DOMAIN = "mfsdp-bench"


class Ranges:
    """One range at a time: `mark` ends the one before."""

    def __init__(self) -> None:
        self._open: Any = None
        self._push, self._pop = nvtx_calls()

    def mark(self, name: str) -> None:
        """A range begins, and the one before it ends."""
        self.end()
        self._open = record_function(f"{_DOMAIN}: {name}")
        self._open.__enter__()
        self._push(name)

    def end(self) -> None:
        """End the range that is open, if one is."""
        if self._open is not None:
            self._pop()
            self._open.__exit__(None, None, None)
            self._open = None


def nvtx_calls() -> tuple[Callable[[str], object], Callable[[], object]]:
    """How to begin and to end an NVTX range here."""
    if importlib.util.find_spec("nvtx") is not None:
        nvtx: Any = importlib.import_module("nvtx")
        return (
            lambda name: nvtx.push_range(message=name, domain=_DOMAIN),
            lambda: nvtx.pop_range(domain=_DOMAIN),
        )
    if torch.cuda.is_available():
        return torch.cuda.nvtx.range_push, torch.cuda.nvtx.range_pop
    return (lambda _name: None, lambda: None)
