"""Account of the bytes that the core holds, by category, with peaks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from mfsdp_core.plan.buffers import CATEGORIES, Category

__all__ = ["CATEGORIES", "POOL", "Booking", "Category", "MemoryLedger"]

#: Stands for the bucket where all slots of a pool are booked as one.
POOL = "(pool)"


@dataclass(frozen=True, slots=True)
class Booking:
    """Bytes taken (positive) or given back (negative) by one buffer.

    in_pool: a part of memory that is booked already, as the slots of a pool, is in use or idle
    again; totals do not change. bucket, role: the buffer; "" where nobody said.
    """

    category: Category
    count_bytes: int
    bucket: str
    role: str
    in_pool: bool = False


BookingSubscriber = Callable[[Booking], None]


class MemoryLedger:
    """Current and peak bytes by category.

    Storage shared by two roles is booked once: where main and compute weights are one copy, a
    sharded copy counts as main weights and a whole one as compute weights. Optimizer state is not
    allocated by the core; it is measured when it is read, by the meters registered for it.

    Subscribers see every booking when it is made, under the rules of `mfsdp_core.events`.
    """

    def __init__(self) -> None:
        self._bytes: dict[Category, int] = dict.fromkeys(CATEGORIES, 0)
        self._peaks: dict[Category, int] = dict.fromkeys(CATEGORIES, 0)
        self._total = 0
        self._peak_total = 0
        self._meters: list[tuple[Category, Callable[[], int]]] = []
        self._subscribers: list[BookingSubscriber] = []
        self._alive: dict[tuple[Category, str, str, bool], int] = {}

    @cached_property
    def host(self) -> MemoryLedger:
        """The account of host memory, which has no part in this one."""
        return MemoryLedger()

    def add(
        self,
        category: Category,
        count_bytes: int,
        bucket: str = "",
        role: str = "",
        in_pool: bool = False,
    ) -> None:
        """Book `count_bytes` (negative: give back) for a buffer; in_pool: see `Booking`."""
        if not in_pool:
            held = self._bytes[category] = self._bytes[category] + count_bytes
            self._total += count_bytes
            if count_bytes > 0:
                # Compared, since a call of `max` costs more than the rest, in every gather.
                if held > self._peaks[category]:  # noqa: PLR1730
                    self._peaks[category] = held
                if self._total > self._peak_total:  # noqa: PLR1730
                    self._peak_total = self._total
        key = (category, bucket, role, in_pool)
        left = self._alive.pop(key, 0) + count_bytes
        if left:
            self._alive[key] = left
        if self._subscribers:
            booking = Booking(category, count_bytes, bucket, role, in_pool)
            for subscriber in self._subscribers:
                subscriber(booking)

    def subscribe(self, subscriber: BookingSubscriber) -> Callable[[], None]:
        """Call `subscriber` with every later booking; the returned function ends that."""
        self._subscribers.append(subscriber)

        def unsubscribe() -> None:
            if subscriber in self._subscribers:
                self._subscribers.remove(subscriber)

        return unsubscribe

    def alive(self) -> list[Booking]:
        """What the buffers that exist now have booked, in the order in which they came."""
        return [
            Booking(category, count, bucket, role, in_pool)
            for (category, bucket, role, in_pool), count in self._alive.items()
        ]

    def measure(self, category: Category, meter: Callable[[], int]) -> None:
        """Let `meter` report the bytes of something that the core does not allocate."""
        self._meters.append((category, meter))

    def bytes_by_category(self) -> dict[str, int]:
        """Bytes held now."""
        return self._with_meters(self._bytes)

    def peak_bytes_by_category(self) -> dict[str, int]:
        """Highest bytes of each category so far; they need not have coincided."""
        return self._with_meters(self._peaks)

    @property
    def peak_bytes(self) -> int:
        """Highest total of what the core itself allocated."""
        return self._peak_total

    def _with_meters(self, booked: dict[Category, int]) -> dict[str, int]:
        result = {str(category): count for category, count in booked.items()}
        for category, meter in self._meters:
            result[category] += meter()
        return result
