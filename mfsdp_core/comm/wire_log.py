"""Ordered record of what this rank put on the wire, and running totals."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from mfsdp_core.events import Event

#: Records kept; totals go on. One record is about 100 bytes.
DEFAULT_CAPACITY = 16_384

_RING_PASSES = {"all_gather": 1, "reduce_scatter": 1, "broadcast": 1, "all_reduce": 2}


@dataclass(frozen=True, slots=True)
class WireRecord:
    """One collective: operation, dtype on the wire, bytes of the full buffer, group, bucket."""

    operation: str
    dtype: str
    payload_bytes: int
    group: str
    group_size: int
    bucket: str

    @property
    def sent_bytes(self) -> int:
        """Bytes that this rank sends under a ring algorithm: (n-1)/n per pass of the buffer.

        The convention of nccl-tests' bus bandwidth; an all-reduce takes two passes.
        """
        return _sent_bytes(self.operation, self.payload_bytes, self.group_size)


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
        sent_bytes = _sent_bytes(event.operation, event.payload_bytes, event.group_size)
        self.sent_bytes += sent_bytes
        self.counts[event.operation] += 1
        if event.operation == "all_gather":
            self.gathered_bytes[event.dtype] += sent_bytes

    def __iter__(self) -> Iterator[WireRecord]:
        return map(_record, self._events)

    def __len__(self) -> int:
        return len(self._events)

    @property
    def issued(self) -> int:
        """How many collectives there have been."""
        return sum(self.counts.values())

    def latest(self, number: int) -> list[tuple[int, WireRecord]]:
        """The last ones, oldest first, each with its number from 1. For any thread."""
        issued = self.issued
        last = list(islice(reversed(self._events), number))
        first = issued - len(last) + 1
        return [(first + index, _record(event)) for index, event in enumerate(reversed(last))]

    def clear(self) -> None:
        """Forget records and totals."""
        self._events.clear()
        self.sent_bytes = 0
        self.counts.clear()
        self.gathered_bytes.clear()


def _sent_bytes(operation: str, payload_bytes: int, group_size: int) -> int:
    return _RING_PASSES[operation] * payload_bytes * (group_size - 1) // group_size


def _record(event: Event) -> WireRecord:
    return WireRecord(
        event.operation,
        event.dtype,
        event.payload_bytes,
        event.group,
        event.group_size,
        event.bucket,
    )
