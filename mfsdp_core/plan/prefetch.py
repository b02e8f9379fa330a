"""Which units to gather ahead of need: an order, a budget and a capacity, and a pure decision.

[Note: gather order] A gather needs all ranks. Ranks that skip different units therefore take part
in the gathers of what they skip, without running it: when a unit is about to run, every unit before
it in the order, which this rank will not run any more, is gathered for the other ranks and released
at once. All ranks then issue the same gathers in the same order, whatever paths they take: in a
forward pass each unit once in the order of `PrefetchOrder`, in a backward pass in the reverse one.
Where every unit runs, nothing is gathered in addition.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from mfsdp_core.errors import ConfigurationError

Direction = Literal["forward", "backward"]
OrderName = Literal["recorded", "static"]


@dataclass(frozen=True)
class PrefetchLimits:
    """How far ahead units are gathered.

    budget_bytes: of all units that are gathered ahead and have not run yet; None: the next unit,
    whatever its size. slots: of the pool that serves weights; None: there is no pool.
    """

    budget_bytes: int | None = None
    slots: int | None = None


@dataclass(frozen=True)
class Residents:
    """What is in memory when the decision is made. Units are known by their indices.

    gathered: units whose weights are there or under way. ahead_bytes: of those that have not run
    yet. pooled: units that take a slot. slots: the slot that a unit had, of those that had one.
    holding: slots that are taken, by units that are live, requested or about to be released.
    """

    gathered: Container[int] = frozenset()
    ahead_bytes: int = 0
    pooled: Container[int] = frozenset()
    slots: Mapping[int, int] = field(default_factory=dict)
    holding: frozenset[int] = frozenset()


def gather_ahead(
    upcoming: Iterable[int],
    sizes_bytes: Sequence[int],
    limits: PrefetchLimits,
    residents: Residents,
    *,
    from_unit: bool,
) -> list[int]:
    """Units of `upcoming` (nearest first) to gather now; never out of order.

    Nothing where a pool is fixed and the root triggers it rather than a unit: a parameter that the
    root owns may be used again at the end of the model, when its successors will not run for long
    (R6). Nobody is gathered into a slot that is not idle.
    """
    if limits.slots is not None and not from_unit:
        return []
    chosen: list[int] = []
    ahead_bytes, holding = residents.ahead_bytes, residents.holding
    for unit in upcoming:
        if unit not in residents.gathered:
            ahead_bytes += sizes_bytes[unit]
            if limits.budget_bytes is not None and ahead_bytes > limits.budget_bytes:
                break
            if limits.slots is not None and unit in residents.pooled:
                slot = residents.slots.get(unit)
                if slot is None:
                    slot = next((s for s in range(limits.slots) if s not in holding), None)
                if slot is None or slot in holding or len(holding) >= limits.slots:
                    break
                holding |= {slot}
            chosen.append(unit)
        if limits.budget_bytes is None:
            break
    return chosen


def unit_order(order: str | Sequence[str], names: Sequence[str]) -> list[int] | None:
    """Indices of the units in a given order; None for the orders that have a name.

    Raises:
        ConfigurationError: an unknown name, or an order that is not one of all units.
    """
    if isinstance(order, str):
        if order not in ("recorded", "static"):
            raise ConfigurationError(
                f"prefetch_order={order!r}: expected 'recorded', 'static', or the names of all "
                "units in the order in which they run."
            )
        return None
    if sorted(order) != sorted(names):
        missing, unknown = sorted(set(names) - set(order)), sorted(set(order) - set(names))
        raise ConfigurationError(
            f"prefetch_order must name every unit once. Missing: {', '.join(missing) or 'none'}; "
            f"unknown: {', '.join(unknown) or 'none'}; given {len(order)} names of {len(names)}."
        )
    indices = {name: index for index, name in enumerate(names)}
    return [indices[name] for name in order]


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
    runs several times keeps its first position.

    given: an order of the user's, which is never replaced; records: adopt the order that is seen.
    agree: whether all ranks have seen a pass run the same units, in this order. positions: of units
    in the sequence of a direction.
    """

    def __init__(
        self,
        units: int,
        backward: Sequence[int] | None = None,
        *,
        given: Sequence[int] | None = None,
        records: bool = True,
        agree: Callable[[Sequence[int]], bool] = lambda _seen: True,
    ) -> None:
        self._units = units
        self._agree = agree
        self._recording: list[int] = []
        self._ended: list[int] = []
        self._recorded = given is not None or not records
        forward = list(range(units)) if given is None else list(given)
        nested = backward if given is None else None
        self._adopt(forward, list(reversed(forward)) if nested is None else list(nested))

    def observe(self, unit: int) -> None:
        """Note that `unit` begins its forward pass."""
        if not self._recorded and unit not in self._recording:
            self._recording.append(unit)

    def observe_end(self, unit: int) -> None:
        """Note that `unit` ends its forward pass, after the units inside it."""
        if not self._recorded and unit not in self._ended:
            self._ended.append(unit)

    def finish_pass(self) -> None:
        """Adopt the order of the pass that just ended, if it ran every unit on every rank."""
        if not self._recorded:
            agreed = self._agree(self._recording)
            if agreed and len(self._recording) == self._units:
                ended = self._ended if len(self._ended) == self._units else self._recording
                self._adopt(self._recording, list(reversed(ended)))
                self._recorded = True
        self._recording, self._ended = [], []

    def sequence(self, direction: Direction) -> list[int]:
        """All units in the order in which a pass is expected to gather them."""
        return self._sequences[direction]

    def upcoming(self, unit: int | None, direction: Direction) -> Iterator[int]:
        """The units that are expected to run after `unit`, nearest first.

        None: the root, which runs before all.
        """
        sequence = self._sequences[direction]
        start = 0 if unit is None else self.positions[direction][unit] + 1
        return map(sequence.__getitem__, range(start, len(sequence)))

    def _adopt(self, forward: list[int], backward: list[int]) -> None:
        self._sequences: dict[Direction, list[int]] = {"forward": forward, "backward": backward}
        self.positions = {
            direction: {unit: position for position, unit in enumerate(sequence)}
            for direction, sequence in self._sequences.items()
        }


class GatherOrder:
    """Which units one pass has gathered, in one direction. Units are known by their indices.

    gathered: those that the pass has gathered, where whoever gathers a unit adds it.
    """

    def __init__(self, order: PrefetchOrder, direction: Direction) -> None:
        self._order = order
        self._direction: Direction = direction
        self.gathered: set[int] = set()
        self.end()

    def end(self) -> None:
        """No pass runs: no unit is waited for."""
        self._sequence: list[int] = []
        self.gathered.clear()
        self._first = 0

    def begin(self) -> None:
        """A pass begins: no unit has been gathered."""
        self.end()
        self._sequence = self._order.sequence(self._direction)

    def missing_before(self, index: int | None) -> list[int]:
        """Units before `index` in the order (None: before the end) that were not gathered yet.

        None for a unit that was gathered already: it runs once more.
        """
        sequence, gathered = self._sequence, self.gathered
        if not sequence or index in gathered:
            return []
        end = len(sequence) if index is None else self._order.positions[self._direction][index]
        while self._first < end and sequence[self._first] in gathered:
            self._first += 1
        rest = sequence[self._first : end]
        return rest and [other for other in rest if other not in gathered]
