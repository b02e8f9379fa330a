"""Timeline of an engine's memory in one step: what took how many bytes, and when.

[Note: the recorded step] It is step 2: optimizer state and pools exist by then, so the step is like
any later one, and the steady-state rule never counts the first two steps, so recording costs no
number anything. Outside of it nothing subscribes to the ledger, so booking costs no more than
usual.
"""

from __future__ import annotations

from collections.abc import Mapping
from time import perf_counter
from typing import Any, Final

from bench.engines.protocol import Booked, Engine, HasLedger, LedgerView
from bench.meters.saved_activations import SavedActivations
from bench.record import MemoryChange, MemoryTimeline

RECORDED_STEP: Final = 2


class TimelineMeter:
    """Records one step of `engine`; None for engines that keep no ledger (`of`)."""

    def __init__(self, ledger: LedgerView, activations: SavedActivations | None) -> None:
        self._ledger = ledger
        self._activations = activations
        self._began = 0.0
        self._start: list[MemoryChange] = []
        self._changes: list[dict[str, Any]] = []
        self._marks: list[tuple[float, str]] = []
        self._stop: Any = None
        self.timeline: MemoryTimeline | None = None

    @classmethod
    def of(cls, engine: Engine, activations: SavedActivations | None) -> TimelineMeter | None:
        """A meter for engines that keep a ledger."""
        return cls(engine.ledger(), activations) if isinstance(engine, HasLedger) else None

    def after_step(self, step: int) -> None:
        """Callback of the loop, between two steps."""
        if step == RECORDED_STEP - 1:
            self._begin()
        elif step == RECORDED_STEP:
            self._end(step)

    def on_phase(self, name: str) -> None:
        """A part of the step begins."""
        if self._stop is not None:
            self._marks.append((self._now(), name))

    def _begin(self) -> None:
        self._start = [MemoryChange(**_fields(0.0, booked)) for booked in self._ledger.alive()]
        self._start += self._only_measured()
        if self._activations is not None:
            kept = self._activations.alive_bytes
            self._start.append(MemoryChange(category="activations", bytes=kept))
            self._activations.observer = self._activation
        self._stop = self._ledger.subscribe(self._booked)
        self._began = perf_counter()

    def _end(self, step: int) -> None:
        milliseconds = self._now()
        if self._stop is None:
            return
        self._stop()
        self._stop = None
        if self._activations is not None:
            self._activations.observer = None
        self.timeline = MemoryTimeline(
            step=step,
            milliseconds=milliseconds,
            start=tuple(self._start),
            changes=tuple(MemoryChange(**fields) for fields in self._changes),
            marks=tuple(self._marks),
        )

    def _only_measured(self) -> list[MemoryChange]:
        """What no buffer stands for: optimizer state, which torch allocates."""
        booked: dict[str, int] = {}
        for change in self._start:
            if not change.in_pool:
                booked[change.category] = booked.get(change.category, 0) + change.bytes
        return [
            MemoryChange(category=category, bytes=held - booked.get(category, 0))
            for category, held in self._ledger.bytes_by_category().items()
            if held != booked.get(category, 0)
        ]

    def _booked(self, booked: Booked) -> None:
        # Plain data, not a model: this runs inside of the step.
        self._changes.append(_fields(self._now(), booked))

    def _activation(self, change_bytes: int) -> None:
        change = {"milliseconds": self._now(), "category": "activations", "bytes": change_bytes}
        self._changes.append(change)

    def _now(self) -> float:
        return (perf_counter() - self._began) * 1e3


def _fields(milliseconds: float, booked: Booked) -> dict[str, Any]:
    """Of a `MemoryChange`."""
    return {
        "milliseconds": milliseconds,
        "category": booked.category,
        "bytes": booked.count_bytes,
        "bucket": booked.bucket,
        "role": booked.role,
        "in_pool": booked.in_pool,
    }


def attributed(timeline: MemoryTimeline, by_category: Mapping[str, int | None]) -> MemoryTimeline:
    """With main weights apart from compute weights, as the engine counts them.

    [Note: one attribution] Where one whole copy serves as main and compute weights, the core's
    ledger books all of it as compute weights, and the engine says which part the optimizer updates.
    That part is main weights wherever memory is shown or compared. by_category: the engine's own
    account.
    """
    updated = by_category.get("main_weights", 0)
    if not updated or any(change.category == "main_weights" for change in timeline.start):
        return timeline
    apart = (
        MemoryChange(category="compute_weights", bytes=-updated),
        MemoryChange(category="main_weights", bytes=updated),
    )
    return timeline.model_copy(update={"start": (*timeline.start, *apart)})
