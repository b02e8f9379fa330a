"""What the core publishes while it runs; meters, the validator and tests subscribe.

Subscribers are called synchronously, in order of subscription, on the thread that caused the event
(autograd's for the backward pass). They must be cheap and must not call back into the core.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

EventKind = Literal["collective", "land", "materialise", "release", "prefetch"]


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that happened.

    kind: `collective` issued; reduced gradient `land`ed; compute weights `materialise`d or
    `release`d; a gather issued ahead of need (`prefetch`, besides its `collective`).
    operation: all_gather, reduce_scatter, all_reduce, broadcast; for `land` copy or add; else "".
    dtype: torch's name without prefix, as `bfloat16`. payload_bytes: size of the full (unsharded)
    buffer of a collective, or of what landed or was allocated. group: role of the process group
    (`inner`, `outer`; of experts `expert_inner`, `expert_outer`). group_size: ranks in it.
    bucket: name of the buffer, as `layers.0/0`.
    """

    kind: EventKind
    operation: str
    dtype: str
    payload_bytes: int
    group: str
    group_size: int
    bucket: str


Subscriber = Callable[[Event], None]


class EventBus:
    """Fan-out of events; publishing without a subscriber costs one truth test."""

    def __init__(self) -> None:
        self._subscribers: list[Subscriber] = []

    def subscribe(self, subscriber: Subscriber) -> Callable[[], None]:
        """Call `subscriber` with every later event; the returned function ends that."""
        self._subscribers.append(subscriber)

        def unsubscribe() -> None:
            if subscriber in self._subscribers:
                self._subscribers.remove(subscriber)

        return unsubscribe

    def publish(self, event: Event) -> None:
        """Hand `event` to every subscriber."""
        for subscriber in self._subscribers:
            subscriber(event)
