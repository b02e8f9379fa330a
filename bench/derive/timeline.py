"""The memory of one step as series and as a peak, from the changes that a run has recorded.

[Note: one attribution] Where one whole copy serves as main and compute weights, the core's ledger
books all of it as compute weights, and the engine says which part the optimizer updates. That part
is main weights wherever memory is shown or compared: in bars, timelines and tables.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from bench.record import MemoryChange, MemoryTimeline, understood

#: Bucket under which a ledger books all slots of a pool.
POOL = "(pool)"


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
    where a category is held and not told.
    untold: those.
    """

    peak_bytes: int | None
    by_category: dict[str, int]
    is_measured: bool
    untold: tuple[str, ...] = ()


def ledger_peak(memory: Mapping[str, Any] | None) -> LedgerPeak:
    """The ledger's peak in a `memory.json`; of older ones it is derived from the timeline."""
    recorded = (memory or {}).get("ledger")
    if isinstance(recorded, Mapping):
        found = _bytes_by_category(recorded)
        if found and recorded.get("peak_bytes") == sum(found.values()):
            return LedgerPeak(sum(found.values()), found, is_measured=True)
    timeline = read_timeline(memory)
    if timeline is not None:
        moment = peak(timeline).moment
        found = {name: size for name, size in moment.by_category.items() if size}
        return LedgerPeak(moment.total_bytes, found, is_measured=True)
    found = _bytes_by_category(memory)
    said = _by_category(memory)
    untold = tuple(sorted(name for name, size in said.items() if size is None))
    if "main_weights" in said and "gradients" not in said:
        untold = ("gradients",)  # as engines that say a part alone recorded it at first
    known = found and not untold and "activations" not in found
    return LedgerPeak(sum(found.values()) if known else None, found, False, untold)


def read_timeline(memory: Mapping[str, Any] | None) -> MemoryTimeline | None:
    """`timeline` of a `memory.json`; None where there is none that can be understood."""
    timeline = understood(MemoryTimeline, (memory or {}).get("timeline"))
    return timeline and attributed(timeline, _bytes_by_category(memory))


def attributed(timeline: MemoryTimeline, by_category: Mapping[str, int | None]) -> MemoryTimeline:
    """With main weights apart from compute weights, as the engine counts them.

    See [Note: one attribution]. by_category: the engine's own account.
    """
    updated = by_category.get("main_weights", 0)
    if not updated or any(c.category == "main_weights" for c in timeline.start):
        return timeline
    apart = (
        MemoryChange(category="compute_weights", bytes=-updated),
        MemoryChange(category="main_weights", bytes=updated),
    )
    return timeline.model_copy(update={"start": (*timeline.start, *apart)})


def _bytes_by_category(document: Mapping[str, Any] | None) -> dict[str, int]:
    """`by_category_bytes` as far as it holds numbers."""
    return {
        str(name): int(value)
        for name, value in _by_category(document).items()
        if isinstance(value, int | float) and math.isfinite(value)
    }


def moments(timeline: MemoryTimeline) -> list[Moment]:
    """The start of the step, and every change of a category after it."""
    return [moment for moment, _ in _walk(timeline)]


def peak(timeline: MemoryTimeline) -> MemoryPeak:
    """Where the step held the most."""
    best: Moment | None = None
    held: dict[tuple[str, str, str, bool], int] = {}
    for moment, alive in _walk(timeline):
        if best is None or _height(moment) > _height(best):
            best, held = moment, dict(alive)
    found = [
        MemoryChange(category=category, bytes=size, bucket=bucket, role=role, in_pool=in_pool)
        for (category, bucket, role, in_pool), size in held.items()
        if size > 0
    ]
    return MemoryPeak(best or Moment(0.0, {}), tuple(found))


def _height(moment: Moment) -> tuple[int, int]:
    return moment.total_bytes, -moment.idle_bytes


def _walk(
    timeline: MemoryTimeline,
) -> Iterator[tuple[Moment, dict[tuple[str, str, str, bool], int]]]:
    """Every moment with the buffers held then; the mapping is reused, so copy what is kept."""
    by_category: dict[str, int] = {}
    alive: dict[tuple[str, str, str, bool], int] = {}
    idle = sum(_apply(change, by_category, alive) for change in timeline.start)
    yield Moment(0.0, dict(by_category), idle), alive
    for change in timeline.changes:
        idle += _apply(change, by_category, alive)
        yield Moment(change.milliseconds, dict(by_category), idle), alive


def _apply(
    change: MemoryChange,
    by_category: dict[str, int],
    alive: dict[tuple[str, str, str, bool], int],
) -> int:
    """Book `change`; the bytes of pools that it leaves idle (negative: puts to use)."""
    if not change.in_pool:
        by_category[change.category] = by_category.get(change.category, 0) + change.bytes
    key = (change.category, change.bucket, change.role, change.in_pool)
    alive[key] = alive.get(key, 0) + change.bytes
    if change.in_pool:
        return -change.bytes
    return change.bytes if change.bucket == POOL else 0


def _by_category(document: Mapping[str, Any] | None) -> Mapping[str, Any]:
    ledger = (document or {}).get("by_category_bytes")
    return ledger if isinstance(ledger, Mapping) else {}
