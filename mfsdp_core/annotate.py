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

_BACKWARD = "backward"
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
        self._units: dict[str, list[Any]] = {}
        self._backward: tuple[str, Any] | None = None
        self._collectives: dict[int, Any] = {}
        self._issued = 0

    def __call__(self, event: Event) -> None:
        """A unit begins or ends."""
        unit = event.bucket or "root"
        name = f"{event.operation} {unit}"
        if event.operation == _BACKWARD:
            if event.kind == "enter":
                self._close_backward()
                self._backward = (name, self._begin(name))
            elif self._backward is not None and name in {self._backward[0], f"{_BACKWARD} root"}:
                self._close_backward()
        elif event.kind == "enter":
            self._units.setdefault(name, []).append(self._begin(name))
        elif self._units.get(name):
            self._end(self._units[name].pop())

    def issued(self, name: str) -> int:
        """A collective starts."""
        self._issued += 1
        self._collectives[self._issued] = self._begin(name)
        return self._issued

    def waited(self, number: int) -> None:
        """The current stream waits for it."""
        if number in self._collectives:
            self._end(self._collectives.pop(number))

    def close(self) -> None:
        """End what is open."""
        self._close_backward()
        for handle in (
            *self._collectives.values(),
            *(h for hs in self._units.values() for h in hs),
        ):
            self._end(handle)
        self._collectives.clear()
        self._units.clear()

    def _close_backward(self) -> None:
        if self._backward is not None:
            self._end(self._backward[1])
            self._backward = None
