"""The memory of one step as series and as a peak, from the changes that a run has recorded."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

from bench.record import MemoryChange, MemoryTimeline, understood

#: Bucket under which a ledger books all slots of a pool.
POOL = "(pool)"
_Buffer = tuple[str, str, str, bool]


@dataclass(frozen=True)
class Moment:
    """Bytes by category from `milliseconds` on. idle_bytes: of them, in slots that nobody uses."""

    milliseconds: float
    by_category: Mapping[str, int]
    idle_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        """Over all categories."""
        return sum(self.by_category.values())


@dataclass(frozen=True)
class MemoryPeak:
    """The moment with the most bytes, and what was held then.

    Of equals the one with the most of its pools in use, then the first: its bytes never change.
    """

    moment: Moment
    alive: tuple[MemoryChange, ...]


@dataclass(frozen=True)
class LedgerPeak:
    """The most that rank 0 held at one moment, and what that was, by category.

    is_measured: an engine's ledger was followed through a step. Otherwise by_category holds the
    highest bytes of each category, and peak_bytes their sum: an upper bound. It is None where
    activations are among them, which are gone when the other categories are at their highest, and
    where a category is held and not reported.
    untold: those.
    """

    peak_bytes: int | None
    by_category: dict[str, int]
    is_measured: bool
    untold: tuple[str, ...] = ()


def ledger_peak(memory: Mapping[str, Any] | None) -> LedgerPeak:
    """The ledger's peak in a `memory.json`."""
    recorded = (memory or {}).get("ledger")
    if isinstance(recorded, Mapping):
        held, _ = _bytes_by_category(recorded)
        if held and recorded.get("peak_bytes") == sum(held.values()):
            return LedgerPeak(sum(held.values()), held, is_measured=True)
    held, untold = _bytes_by_category(memory)
    known = held and not untold and "activations" not in held
    return LedgerPeak(sum(held.values()) if known else None, held, False, untold)


def _bytes_by_category(
    document: Mapping[str, Any] | None,
) -> tuple[dict[str, int], tuple[str, ...]]:
    """`by_category_bytes` as far as it holds numbers, and the categories without one."""
    ledger = (document or {}).get("by_category_bytes")
    said = ledger if isinstance(ledger, Mapping) else {}
    sizes = {
        str(name): int(value)
        for name, value in said.items()
        if isinstance(value, int | float) and math.isfinite(value)
    }
    return sizes, tuple(sorted(name for name, size in said.items() if size is None))


def read_timeline(memory: Mapping[str, Any] | None) -> MemoryTimeline | None:
    """`timeline` of a `memory.json`; None where there is none that can be understood."""
    return understood(MemoryTimeline, (memory or {}).get("timeline"))


def moments(timeline: MemoryTimeline) -> list[Moment]:
    """The start of the step, and every change of a category after it."""
    return [moment for moment, _ in _walk(timeline)]


def peak(timeline: MemoryTimeline) -> MemoryPeak:
    """Where the step held the most."""
    every = moments(timeline)
    highest = max(range(len(every)), key=lambda n: (every[n].total_bytes, -every[n].idle_bytes))
    moment, alive = next(islice(_walk(timeline), highest, None))
    buffers = [
        MemoryChange(category=category, bytes=size, bucket=bucket, role=role, in_pool=in_pool)
        for (category, bucket, role, in_pool), size in alive.items()
        if size > 0
    ]
    return MemoryPeak(moment, tuple(buffers))


def _walk(timeline: MemoryTimeline) -> Iterator[tuple[Moment, Counter[_Buffer]]]:
    """Every moment with the buffers held then; the mapping is reused, so copy what is kept."""
    by_category: Counter[str] = Counter()
    alive: Counter[_Buffer] = Counter()
    idle_bytes = 0
    later = [(change.milliseconds, (change,)) for change in timeline.changes]
    for milliseconds, changes in [(0.0, timeline.start), *later]:
        for booked in changes:
            alive[booked.category, booked.bucket, booked.role, booked.in_pool] += booked.bytes
            if booked.in_pool:
                idle_bytes -= booked.bytes
            else:
                by_category[booked.category] += booked.bytes
                idle_bytes += booked.bytes if booked.bucket == POOL else 0
        yield Moment(milliseconds, dict(by_category), idle_bytes), alive
