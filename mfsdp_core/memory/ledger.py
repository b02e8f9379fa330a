"""Account of the bytes that the core holds, by category, with peaks."""

from __future__ import annotations

from collections.abc import Callable

from mfsdp_core.plan.memory_model import CATEGORIES, Category

__all__ = ["CATEGORIES", "Category", "MemoryLedger"]


class MemoryLedger:
    """Current and peak bytes by category.

    Storage shared by two roles is booked once: where main and compute weights are one copy, a
    sharded copy counts as main weights and a whole one as compute weights. Optimizer state is not
    allocated by the core; it is measured when asked, by the meters registered for it.
    """

    def __init__(self) -> None:
        self._bytes: dict[Category, int] = dict.fromkeys(CATEGORIES, 0)
        self._peaks: dict[Category, int] = dict.fromkeys(CATEGORIES, 0)
        self._total = 0
        self._peak_total = 0
        self._meters: list[tuple[Category, Callable[[], int]]] = []

    def add(self, category: Category, count_bytes: int) -> None:
        """Book `count_bytes` (negative: give back)."""
        self._bytes[category] += count_bytes
        self._peaks[category] = max(self._peaks[category], self._bytes[category])
        self._total += count_bytes
        self._peak_total = max(self._peak_total, self._total)

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
