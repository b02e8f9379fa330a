"""Starting the ranks of one run, watching them, and ending all of them on every path.

Torch-free, `agent` apart. Names are loaded when they are used: every rank imports this package on
its way to `rank`, and should be tied to its parent's life before it loads anything else.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bench.launch.code import code_identity
    from bench.launch.run import launch
    from bench.launch.watch import Limits

__all__ = ["Limits", "code_identity", "launch"]

_HOMES = {
    "Limits": "bench.launch.watch",
    "code_identity": "bench.launch.code",
    "launch": "bench.launch.run",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
