"""What the core publishes while it runs; meters, the validator and tests subscribe.

Subscribers are called synchronously, in order of subscription, on the thread that caused the event
(autograd's for the backward pass). They must be cheap and must not call back into the core.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal, get_args

BufferKind = Literal["collective", "land", "materialise", "release", "prefetch", "agreement"]
UnitKind = Literal["enter", "leave"]
EventKind = BufferKind | UnitKind
EVENT_KINDS: tuple[EventKind, ...] = get_args(BufferKind)
UNIT_KINDS: tuple[EventKind, ...] = get_args(UnitKind)


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that happened.

    kind: `collective` issued; reduced gradient `land`ed; compute weights `materialise`d or
    `release`d; a gather issued ahead of need (`prefetch`, besides its `collective`); an `agreement`
    of all ranks, by a message that holds nothing of the model. For who asks by name: a pass
    `enter`s a unit and `leave`s it.
    operation: all_gather, reduce_scatter, all_reduce, broadcast, all_to_all; for `land` copy or
    add; of a unit forward, recompute or backward; else "".
    dtype: torch's name without prefix, as `bfloat16`. payload_bytes: size of the full (unsharded)
    buffer of a collective, of this rank's input of an all_to_all, or of what landed or was
    allocated. group: role of the process group (`inner`, `outer`; of experts `expert_inner`,
    `expert_outer`). group_size: ranks in it.
    bucket: name of the buffer, as `layers.0/0`, or of the unit.
    """

    kind: EventKind
    operation: str
    dtype: str
    payload_bytes: int
    group: str
    group_size: int
    bucket: str

    @property
    def sent_bytes(self) -> int:
        """Of a collective: bytes that this rank sends under a ring, (n-1)/n per pass of the buffer.

        The convention of nccl-tests' bus bandwidth; an all-reduce takes two passes.
        """
        passes = 2 if self.operation == "all_reduce" else 1
        return passes * self.payload_bytes * (self.group_size - 1) // self.group_size


Subscriber = Callable[[Event], None]


class EventBus:
    """Fan-out of events. Without a subscriber an event costs a look at a set, if publishers ask.

    wanted: the kinds that anybody would see; a publisher looks there before it makes an event,
    which costs more than handing it over.
    """

    def __init__(self) -> None:
        self._subscriptions: list[tuple[Subscriber, frozenset[EventKind]]] = []
        self.wanted: frozenset[EventKind] = frozenset()

    def subscribe(
        self, subscriber: Subscriber, kinds: Iterable[EventKind] = EVENT_KINDS
    ) -> Callable[[], None]:
        """Call `subscriber` with every later event of `kinds`; the returned function ends that."""
        subscription = (subscriber, frozenset(kinds))
        self._subscriptions.append(subscription)
        self._count_wanted()

        def unsubscribe() -> None:
            if subscription in self._subscriptions:
                self._subscriptions.remove(subscription)
                self._count_wanted()

        return unsubscribe

    def publish(self, event: Event) -> None:
        """Hand `event` to every subscriber of its kind."""
        for subscriber, kinds in self._subscriptions:
            if event.kind in kinds:
                subscriber(event)

    def _count_wanted(self) -> None:
        self.wanted = frozenset().union(*(kinds for _, kinds in self._subscriptions))
