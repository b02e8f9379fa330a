"""Ordered record of what this rank put on the wire, and running totals."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from itertools import islice

from mfsdp_core.events import Event

#: Events kept; totals go on. One event is about 100 bytes.
DEFAULT_CAPACITY = 16_384


class WireLog:
    """Subscribe an instance to an `EventBus`; it keeps the last `capacity` collectives.

    Totals of all: sent_bytes; counts, by operation; gathered_bytes, what this rank has sent in
    all-gathers, by dtype on the wire.
    """

    def __init__(self, capacity: int = DEFAULT_CAPACITY) -> None:
        self._events: deque[Event] = deque(maxlen=capacity)
        self.sent_bytes = 0
        self.counts: Counter[str] = Counter()
        self.gathered_bytes: Counter[str] = Counter()

    def __call__(self, event: Event) -> None:
        """Record `event` if it is a collective."""
        if event.kind != "collective":
            return
        self._events.append(event)
        sent_bytes = event.sent_bytes
        self.sent_bytes += sent_bytes
        self.counts[event.operation] += 1
        if event.operation == "all_gather":
            self.gathered_bytes[event.dtype] += sent_bytes

    def __iter__(self) -> Iterator[Event]:
        return iter(self._events)

    def __len__(self) -> int:
        return len(self._events)

    @property
    def issued(self) -> int:
        """How many collectives there have been."""
        return sum(self.counts.values())

    def latest(self, number: int) -> list[tuple[int, Event]]:
        """The last ones, oldest first, each with its number from 1. For any thread."""
        issued = self.issued
        last = list(islice(reversed(self._events), number))
        first = issued - len(last) + 1
        return [(first + index, event) for index, event in enumerate(reversed(last))]

    def clear(self) -> None:
        """Forget events and totals."""
        self._events.clear()
        self.sent_bytes = 0
        self.counts.clear()
        self.gathered_bytes.clear()
