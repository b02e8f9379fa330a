"""Whose turn it is to be gathered.

[Note: gather order] A gather needs all ranks. Ranks that skip different units therefore pass over
what they skip: when a unit is about to run, every unit whose turn came before it, and which this
rank will not run any more, is gathered for the sake of the others and released at once. All ranks
then issue the same gathers in the same order, whatever paths they take: in a forward pass each unit
once in the order of `PrefetchOrder`, in a backward pass in the reverse one. Where every unit runs,
nothing is gathered in addition.
"""

from __future__ import annotations

from collections.abc import Iterator

from mfsdp_core.plan.prefetch import Direction, PrefetchOrder


class Turns:
    """The turns of one pass in one direction. Units are known by their places."""

    def __init__(self, order: PrefetchOrder, direction: Direction) -> None:
        self._order = order
        self._direction: Direction = direction
        self._sequence: list[int] = []
        self._had: set[int] = set()
        self._first = 0

    def begin(self) -> None:
        """A pass begins: nobody has had a turn."""
        self._sequence = self._order.sequence(self._direction)
        self._had.clear()
        self._first = 0

    def end(self) -> None:
        """No pass runs: nobody has a turn to wait for."""
        self._sequence = []
        self._had.clear()

    def take(self, place: int) -> None:
        """The unit is gathered now; it had its turn."""
        self._had.add(place)

    def __contains__(self, place: object) -> bool:
        """Whether the unit had its turn."""
        return place in self._had

    def ahead_of(self, place: int | None) -> Iterator[int]:
        """Units whose turn comes before that of `place` (None: the end) and has not been taken.

        Nothing is ahead of a unit that had its own turn already: it runs once more.
        """
        if place in self:
            return
        sequence, had = self._sequence, self._had
        while self._first < len(sequence) and sequence[self._first] in had:
            self._first += 1
        for position in range(self._first, len(sequence)):
            other = sequence[position]
            if other == place:
                return
            if other not in had:
                yield other
