"""Where a program that fails was: its cycle and pass, and the last events of the core.

Scripts are for people and stay as they are: the rank wraps their `Trial` and `shard`.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections import deque
from types import TracebackType
from typing import Any

_EVENTS = 4
_CORE = f"{os.sep}mfsdp_core{os.sep}"


class Progress:
    """Where the program is, also in the log of the rank, whose end is told if the rank dies."""

    def __init__(self) -> None:
        self.where = "while it was built"
        self._events: deque[str] = deque(maxlen=_EVENTS)

    def enter(self, where: str) -> None:
        """A part of the program begins."""
        self.where = where
        _write(f"in {where}")

    def follow(self, model: Any) -> None:
        """The events of the core, if it publishes any."""
        events = getattr(model, "events", None)
        if events is not None:
            events.subscribe(self._note)

    def _note(self, event: Any) -> None:
        what = f"last: {event.kind} {event.operation} of {event.bucket}, {event.group}"
        self._events.append(what)
        _write(what)

    def told(self) -> list[str]:
        """As lines."""
        return [f"in {self.where}", *self._events]


def _write(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


def wrap(names: dict[str, Any]) -> Progress:
    """Make the program's `Trial` and `shard` tell what they do. names: of the script."""
    progress, shard = Progress(), names["shard"]

    def following(module: Any) -> Any:
        model, optimizer = shard(module)
        progress.follow(model)
        return model, optimizer

    names["shard"] = following
    names["Trial"] = type("Trial", (_Following, names["Trial"]), {"progress": progress})
    return progress


_Trial: Any = object


class _Following(_Trial):
    """Before the script's `Trial`: says where it is."""

    progress: Progress

    def choose(self, paths: Any) -> Any:
        found = super().choose(paths)
        units = ", ".join(f"rank {r}: {p}" for r, p in enumerate(paths))
        self.progress.enter(f"cycle {self.cycle}, pass {self.passes} ({units})")
        return found

    def finish(self, end: str) -> None:
        self.progress.enter(f"cycle {self.cycle}, completing the gradients")
        super().finish(end)

    def step(self) -> None:
        self.progress.enter(f"cycle {self.cycle}, optimizer step")
        super().step()


def core_frames(trace: TracebackType | None) -> list[str]:
    """The lines of the core that an exception went through, innermost last."""
    return [
        f"at mfsdp_core/{frame.filename.rpartition(_CORE)[2]}:{frame.lineno} {frame.name}"
        for frame in traceback.extract_tb(trace)
        if _CORE in frame.filename
    ][-2:]
