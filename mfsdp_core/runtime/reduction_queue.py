"""Reductions under way, oldest first.

At most `IN_FLIGHT` units have a reduction under way that holds memory; landing the oldest before
starting another bounds it and overlaps each reduction with the backward pass of the next unit.
Reductions in place are not waited for before the end of the backward pass.
"""

from __future__ import annotations

from collections import deque

from mfsdp_core.runtime.gradient_buffers import GradientBuffers
from mfsdp_core.runtime.units import Unit

#: Units whose reductions, with memory of their own, may be under way at once.
IN_FLIGHT = 1


class ReductionQueue:
    """Inner reductions by unit, each followed by its outer stage where the cycle ends with it."""

    def __init__(self) -> None:
        self._inner: deque[tuple[Unit, bool, bool]] = deque()
        self._holding = 0  # of them, those that hold memory
        self._outer: deque[GradientBuffers] = deque()

    def __contains__(self, unit: object) -> bool:
        """Whether a reduction of the unit is under way."""
        for flying, _, _ in self._inner:  # noqa: SIM110 - one frame, in the hooks of every pass
            if flying is unit:
                return True
        return False

    def start(self, unit: Unit, buffers: GradientBuffers, *, is_last: bool) -> None:
        """Reduce one bucket of `unit`. is_last: the outer stage follows."""
        joins = unit not in self
        takes_memory = joins and _takes_memory(unit)
        if takes_memory:
            while self._holding >= IN_FLIGHT:
                self._land_oldest()
        buffers.issue()
        if joins:
            self._holding += takes_memory
            self._inner.append((unit, is_last, takes_memory))

    def start_outer(self, buffers: GradientBuffers) -> None:
        """Start the outer stage of a bucket whose inner one has landed."""
        while len(self._outer) >= IN_FLIGHT:
            self._outer.popleft().land_outer()
        buffers.issue_outer()
        self._outer.append(buffers)

    def drain_oldest(self) -> bool:
        """Land the oldest reduction, so that its bucket becomes free; False if there is none."""
        if not self._inner:
            return False
        self._land_oldest()
        return True

    def land_all(self) -> None:
        """Wait for and land all reductions under way, those of the outer axis included."""
        while self._inner:
            self._land_oldest()
        while self._outer:
            self._outer.popleft().land_outer()

    def _land_oldest(self) -> None:
        unit, is_last, takes_memory = self._inner.popleft()
        self._holding -= takes_memory
        for buffers in unit.gradients:
            buffers.land()
            if is_last and buffers.awaits_outer and not buffers.has_open_bucket:
                self.start_outer(buffers)


def _takes_memory(unit: Unit) -> bool:
    for buffers in unit.gradients:  # noqa: SIM110 - as above
        if not buffers.reduces_in_place:
            return True
    return False
