"""Which unit to gather ahead of need: a pure decision over a recorded or static order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

Direction = Literal["forward", "backward"]


def backward_of_nested(parents: Sequence[int | None]) -> list[int]:
    """Backward order of units in registration order. parents: the unit around each, if any.

    The gradient of a unit's output reaches the unit first, then the units inside it, last one
    first.
    """
    inside: dict[int | None, list[int]] = {}
    for unit, parent in enumerate(parents):
        inside.setdefault(parent, []).append(unit)
    order: list[int] = []

    def visit(parent: int | None) -> None:
        for unit in reversed(inside.get(parent, [])):
            order.append(unit)
            visit(unit)

    visit(None)
    return order


class PrefetchOrder:
    """Order in which units run.

    Static (registration order, and `backward`, which is its reverse unless units are nested) until
    a first complete forward pass has been recorded, then the recorded one: models that call their
    children in another order than they register them otherwise gather the wrong unit. A unit that
    runs several times keeps its first place.
    """

    def __init__(self, units: int, backward: Sequence[int] | None = None) -> None:
        self._units = units
        self._recording: list[int] = []
        self._ended: list[int] = []
        self._recorded = False
        forward = list(range(units))
        self._adopt(forward, list(reversed(forward)) if backward is None else list(backward))

    def observe(self, unit: int) -> None:
        """Note that `unit` begins its forward pass."""
        if not self._recorded and unit not in self._recording:
            self._recording.append(unit)

    def observe_end(self, unit: int) -> None:
        """Note that `unit` ends its forward pass, after the units inside it."""
        if not self._recorded and unit not in self._ended:
            self._ended.append(unit)

    def finish_pass(self) -> None:
        """Adopt the order of the pass that just ended, if it ran every unit."""
        if not self._recorded and len(self._recording) == self._units:
            ended = self._ended if len(self._ended) == self._units else self._recording
            self._adopt(self._recording, list(reversed(ended)))
            self._recorded = True
        self._recording, self._ended = [], []

    def sequence(self, direction: Direction) -> list[int]:
        """All units in the order in which a pass is expected to gather them."""
        return self._sequences[direction]

    def following(self, unit: int | None, direction: Direction) -> int | None:
        """The unit that is expected to run after `unit` (None: the root, which runs before all).

        None at the end.
        """
        sequence = self._sequences[direction]
        place = 0 if unit is None else self._positions[direction][unit] + 1
        return sequence[place] if place < len(sequence) else None

    def _adopt(self, forward: list[int], backward: list[int]) -> None:
        self._sequences: dict[Direction, list[int]] = {"forward": forward, "backward": backward}
        self._positions = {
            direction: {unit: place for place, unit in enumerate(sequence)}
            for direction, sequence in self._sequences.items()
        }
