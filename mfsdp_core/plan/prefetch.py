"""Which unit to gather ahead of need: a pure decision over a recorded or static order."""

from __future__ import annotations

from typing import Literal

Direction = Literal["forward", "backward"]


class PrefetchOrder:
    """Order in which units run.

    Static (registration order) until a first complete forward pass has been recorded, then the
    recorded one: models that call their children in another order than they register them
    otherwise gather the wrong unit. A unit that runs several times keeps its first place.
    """

    def __init__(self, units: int) -> None:
        self._units = units
        self._order = list(range(units))
        self._position = {unit: place for place, unit in enumerate(self._order)}
        self._recording: list[int] = []
        self._recorded = False

    def observe(self, unit: int) -> None:
        """Note that `unit` begins its forward pass."""
        if not self._recorded and unit not in self._recording:
            self._recording.append(unit)

    def finish_pass(self) -> None:
        """Adopt the order of the pass that just ended, if it ran every unit."""
        if not self._recorded and len(self._recording) == self._units:
            self._order = self._recording
            self._position = {unit: place for place, unit in enumerate(self._order)}
            self._recorded = True
        self._recording = []

    def following(self, unit: int | None, direction: Direction) -> int | None:
        """The unit that is expected to run after `unit` (None: the root, which runs before all).

        None at the end.
        """
        step = 1 if direction == "forward" else -1
        if unit is None:
            place = 0 if direction == "forward" else len(self._order) - 1
        else:
            place = self._position[unit] + step
        return self._order[place] if 0 <= place < len(self._order) else None
