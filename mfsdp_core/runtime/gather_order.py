"""In which order units are gathered: the same on every rank.

[Note: gather order] A gather needs all ranks. Ranks that skip different units therefore take part
in the gathers of what they skip, without running it: when a unit is about to run, every unit before
it in the order, which this rank will not run any more, is gathered for the other ranks and released
at once. All ranks then issue the same gathers in the same order, whatever paths they take: in a
forward pass each unit once in the order of `PrefetchOrder`, in a backward pass in the reverse one.
Where every unit runs, nothing is gathered in addition.
"""

from __future__ import annotations

import itertools

from mfsdp_core.plan.prefetch import Direction, PrefetchOrder


class GatherOrder:
    """Which units one pass has gathered, in one direction. Units are known by their indices.

    gathered: those that the pass has gathered, where whoever gathers a unit adds it.
    """

    def __init__(self, order: PrefetchOrder, direction: Direction) -> None:
        self._order = order
        self._direction: Direction = direction
        self._sequence: list[int] = []
        self.gathered: set[int | None] = set()
        self._first = 0

    def begin(self) -> None:
        """A pass begins: no unit has been gathered."""
        self._sequence = self._order.sequence(self._direction)
        self.gathered.clear()
        self._first = 0

    def end(self) -> None:
        """No pass runs: no unit is waited for."""
        self._sequence = []
        self.gathered.clear()

    def missing_before(self, index: int | None) -> list[int]:
        """Units before `index` in the order (None: before the end) that were not gathered yet.

        None for a unit that was gathered already: it runs once more.
        """
        sequence, gathered, first = self._sequence, self.gathered, self._first
        if index in gathered:
            return []
        length = len(sequence)
        while first < length and sequence[first] in gathered:
            first += 1
        self._first = first
        if first < length and sequence[first] == index:
            return []
        rest = itertools.takewhile(lambda other: other != index, sequence[first:])
        return [other for other in rest if other not in gathered]
