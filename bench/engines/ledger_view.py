"""The part of the engine protocol that the memory timeline needs: an account that can be watched.

Only engines that book every buffer have one; what torch's own engines hold can be measured, but not
followed through a step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable


class Booked(Protocol):
    """Bytes taken or given back; fields as in `bench.record.MemoryChange`."""

    @property
    def category(self) -> str:
        """As `compute_weights`."""

    @property
    def count_bytes(self) -> int:
        """Negative: given back."""

    @property
    def bucket(self) -> str:
        """As `layers.0/0`."""

    @property
    def role(self) -> str:
        """What the bucket's buffer is for."""

    @property
    def in_pool(self) -> bool:
        """Whether the bytes are part of a pool's."""


class LedgerView(Protocol):
    """What is held now, by buffer and by category, and every change from now on."""

    def alive(self) -> Sequence[Booked]:
        """Buffers that exist now."""

    def bytes_by_category(self) -> dict[str, int]:
        """Bytes held now; more than the buffers add up to where something is only measured."""

    def subscribe(self, subscriber: Callable[[Booked], None]) -> Callable[[], None]:
        """Be told every change; the returned function ends that."""


@runtime_checkable
class HasLedger(Protocol):
    """An engine with such an account."""

    def ledger(self) -> LedgerView:
        """It."""
