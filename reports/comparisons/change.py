"""What changed between a base and a head cell: always three named numbers for speed, never one.

"5 % faster" can mean 5 % less time (1.053x the throughput) or 5 % more throughput (4.8 % less
time); published evidence has been read both ways. So time change, throughput change and ratio
appear together and by name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from reports.views.cells import Cell, Number

MemoryMetric = Literal["device_peak", "ledger", "rss"]

MEMORY_TITLES: dict[MemoryMetric, str] = {
    "device_peak": "device memory peak",
    "ledger": "ledger total",
    "rss": "RSS peak",
}


@dataclass(frozen=True)
class Change:
    """Head against base; fractions (0.05 is +5 %), None where a side has no number.

    time_change: head time / base time - 1. throughput_change: head tokens/s / base tokens/s - 1.
    throughput_ratio: head tokens/s / base tokens/s. loss_difference: final losses,
    (head - base) / |base|. memory_change is of `memory_metric`.
    """

    base: Cell
    head: Cell
    time_change: float | None
    throughput_change: float | None
    throughput_ratio: float | None
    memory_metric: MemoryMetric | None
    memory_change: float | None
    wire_bytes_change: float | None
    loss_difference: float | None

    @property
    def sample_note(self) -> str:
        """How many runs stand behind the times, and what follows from it."""
        base, head = self.base.n, self.head.n
        if base == 0 or head == 0:
            return "no time to compare"
        if min(base, head) == 1:
            return "n=1, no interval" if base == head else f"n={head} against {base}, no interval"
        return f"n={head} against {base}, no verdict"


def change_between(base: Cell, head: Cell) -> Change:
    """Compare medians over the runs of both cells."""
    throughput = _ratio(base, head, "tokens_per_second")
    time = _ratio(base, head, "step_milliseconds_median")
    metric = memory_metric([base, head])
    wire = _ratio(base, head, "wire_bytes_per_step")
    memory = None
    if metric is not None:
        before, after = memory_bytes(base, metric), memory_bytes(head, metric)
        memory = after / before - 1 if before and after is not None else None
    return Change(
        base=base,
        head=head,
        time_change=None if time is None else time - 1,
        throughput_change=None if throughput is None else throughput - 1,
        throughput_ratio=throughput,
        memory_metric=metric,
        memory_change=memory,
        wire_bytes_change=None if wire is None else wire - 1,
        loss_difference=_loss_difference(base, head),
    )


def memory_metric(cells: list[Cell]) -> MemoryMetric | None:
    """The most telling memory number that all `cells` have."""
    metrics: tuple[MemoryMetric, ...] = ("device_peak", "ledger", "rss")
    for metric in metrics:
        if cells and all(memory_bytes(cell, metric) is not None for cell in cells):
            return metric
    return None


def memory_bytes(cell: Cell, metric: MemoryMetric) -> float | None:
    """Bytes on the largest rank (device peak, RSS) or on rank 0 (ledger)."""
    if metric == "ledger":
        return float(sum(cell.ledger.values())) if cell.ledger else None
    return cell.value("device_peak_bytes" if metric == "device_peak" else "rss_peak_bytes")


def _ratio(base: Cell, head: Cell, number: Number) -> float | None:
    before, after = base.value(number), head.value(number)
    return after / before if before and after is not None else None


def _loss_difference(base: Cell, head: Cell) -> float | None:
    before, after = base.value("final_loss"), head.value("final_loss")
    if before is None or after is None or before == 0:
        return None
    return (after - before) / abs(before)
