"""Named ranges of what a model does, for whoever draws them: NVTX, a profiler, a list.

Names are stable: `forward UNIT`, `recompute UNIT` (the root is `root`), `backward UNIT`, and
`COLLECTIVE of BUCKET` from where it is issued to where it is waited for. Of backward passes one
range is open at a time: a unit's begins before the end of the one that ran before is known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from mfsdp_core.events import UNIT_KINDS, Event

Begin = Callable[[str], Any]
End = Callable[[Any], object]


@contextmanager
def annotated(model: Any, begin: Begin, end: End) -> Iterator[None]:
    """Within the block: `begin(name)` at the start of a range, `end(what it gave)` at its end.

    model: as `fully_shard_model` returns it. As in
    `annotated(model, torch.cuda.nvtx.range_start, torch.cuda.nvtx.range_end)`.
    """
    annotations = Annotations(begin, end)
    unsubscribe = model.events.subscribe(annotations, kinds=UNIT_KINDS)
    try:
        with model.streams.observed(annotations):
            yield
    finally:
        unsubscribe()
        annotations.close()


class Annotations:
    """`Observer` of streams, and subscriber of unit events. begin gives what end is to be given."""

    def __init__(self, begin: Begin, end: End) -> None:
        self._begin = begin
        self._end = end
        #: What has begun: by the name of a unit's range, innermost last, or number of a collective.
        self._open: dict[str | int, list[Any]] = {}
        self._backward = ""
        self._issued = 0

    def __call__(self, event: Event) -> None:
        """A unit begins or ends."""
        name = f"{event.operation} {event.bucket or 'root'}"
        if event.operation == "backward":
            if event.kind == "leave" and name not in {self._backward, "backward root"}:
                return
            self._finish(self._backward)
            self._backward = name if event.kind == "enter" else ""
        if event.kind == "enter":
            self._start(name, name)
        elif event.operation != "backward":
            self._finish(name)

    def issued(self, name: str) -> int:
        """A collective starts."""
        self._issued += 1
        self._start(self._issued, name)
        return self._issued

    def waited(self, number: int) -> None:
        """The current stream waits for it."""
        self._finish(number)

    def close(self) -> None:
        """End what is open."""
        for key in [key for key, handles in self._open.items() for _ in handles]:
            self._finish(key)

    def _start(self, key: str | int, name: str) -> None:
        self._open.setdefault(key, []).append(self._begin(name))

    def _finish(self, key: str | int) -> None:
        if handles := self._open.get(key):
            self._end(handles.pop())
        if not handles:
            self._open.pop(key, None)
