"""What an author may leave out: speed bought with memory, memory bought with time, a moved loss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bench.derive.metrics import THROUGHPUT, Metric
from reports.comparisons.change import Change
from reports.comparisons.parity import ParityRow, tolerance_for
from reports.renderers import quantity


@dataclass(frozen=True)
class Flag:
    """One trade-off of one cell: what it is called, the numbers and the runs behind it."""

    cell: str
    verdict: str
    numbers: str
    runs: str = ""

    @property
    def text(self) -> str:
        """The whole flag as one phrase."""
        return f"{self.verdict}: {self.numbers}" + (f" ({self.runs})" if self.runs else "")


def threshold(metric: Metric) -> float:
    """Changes below this are not called more or less: what a gate tolerates by default."""
    return (metric.rule and metric.rule.tolerance) or 0.0


SPEED_THRESHOLD = threshold(THROUGHPUT)


def tradeoff_flags(
    changes: Sequence[Change], parity: Mapping[str, ParityRow] | None = None
) -> list[Flag]:
    """Flags of every head cell, in the given order.

    Args:
        changes: each cell against the reference.
        parity: parity rows by cell name, for "loss moved" within one dtype policy.
    """
    flags = []
    for change in changes:
        flags.extend(_flags(change, (parity or {}).get(change.head.name)))
    return flags


def _flags(change: Change, parity: ParityRow | None) -> list[Flag]:
    found = [_speed_against_memory(change), _loss_moved(change, parity)]
    return [Flag(change.head.name, *flag) for flag in found if flag]


def _speed_against_memory(change: Change) -> tuple[str, str, str] | None:
    speed, memory, metric = change.throughput_change, change.memory_change, change.memory_metric
    if speed is None or memory is None or metric is None:
        return None
    enough = threshold(metric)
    faster, slower = speed >= SPEED_THRESHOLD, speed <= -SPEED_THRESHOLD
    more, less = memory >= enough, memory <= -enough
    if faster and more:
        verdict = "faster, but more memory"
    elif slower and less:
        verdict = "less memory, but slower"
    elif slower and more:
        verdict = "slower and more memory"
    else:
        return None
    numbers = f"throughput {quantity.change(speed)}, {metric.title} {quantity.change(memory)}"
    return verdict, numbers, change.sample_note


def _loss_moved(change: Change, parity: ParityRow | None) -> tuple[str, str] | None:
    if parity is not None and parity.verdict == "diverges":
        return "loss moved", (
            f"differs from the same dtype policy's reference by "
            f"{quantity.difference(parity.max_relative)} (relative) at step {parity.at_step}"
        )
    moved = change.loss_difference
    if moved is None:
        return None
    # Of two policies, the coarser one's rounding is the yardstick.
    bounds = [tolerance_for(cell.resolved).bound for cell in (change.base, change.head)]
    if abs(moved) <= max(bounds):
        return None
    return "loss moved", (
        f"final loss {quantity.change(moved, 2)} against {change.base.name}, more than "
        f"the coarser dtype policy's bound of {quantity.share(max(bounds), 2)}"
    )
