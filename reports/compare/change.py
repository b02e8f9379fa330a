"""What changed between a base and a head cell, and what an author may leave out of it.

Of speed there are always three named numbers, never one.

"5 % faster" can mean 5 % less time (1.053x the throughput) or 5 % more throughput (4.8 % less
time); published evidence has been read both ways. So time change, throughput change and ratio
appear together and by name.

`change_table` shows them in reports. Trade-offs are speed bought with memory, memory bought with
time, and a loss that moved.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from bench.derive.metrics import (
    GRAD_NORM,
    LEDGER_PEAK,
    LIVE_STORAGE,
    LOSS,
    MEMORY,
    METRICS,
    RSS,
    STEP_TIME,
    THROUGHPUT,
    Metric,
)
from reports.compare.parity import ParityRow, tolerance_for
from reports.compare.series import relative
from reports.renderers import quantity
from reports.renderers.table import Table
from reports.views.cells import Cell

SPEED = "time change, throughput change, throughput ratio"
"""Title of the column that `speed_text` fills: one change, said once."""


@dataclass(frozen=True)
class Change:
    """Head against base by medians over runs; fractions (0.05 is +5 %), None without a number."""

    base: Cell
    head: Cell

    def ratio(self, metric: Metric) -> float | None:
        """Head / base."""
        before, after = self.base.value(metric), self.head.value(metric)
        return after / before if before and after is not None else None

    def of(self, metric: Metric) -> float | None:
        """(head - base) / |base|."""
        before, after = self.base.value(metric), self.head.value(metric)
        return relative(before, after) if before and after is not None else None

    @property
    def time_change(self) -> float | None:
        """Head time / base time - 1."""
        return self.of(STEP_TIME)

    @property
    def throughput_ratio(self) -> float | None:
        """Head tokens/s / base tokens/s, which follows from the times.

        Of an even number of runs the median of tokens/s is not tokens over the median of times,
        and time, throughput and ratio would contradict each other.
        """
        time = self.ratio(STEP_TIME)
        tokens = self.head.resolved.tokens_per_step / self.base.resolved.tokens_per_step
        return tokens / time if time else None

    @property
    def throughput_change(self) -> float | None:
        """Head tokens/s / base tokens/s - 1."""
        return less_one(self.throughput_ratio)

    @cached_property
    def memory_metric(self) -> Metric | None:
        """What memory is compared by."""
        return memory_metric([self.base, self.head])

    @property
    def memory_change(self) -> float | None:
        """Of `memory_metric`."""
        return None if self.memory_metric is None else self.of(self.memory_metric)

    @property
    def sample_note(self) -> str:
        """How many runs stand behind the times, and what follows from it."""
        base, head = self.base.n, self.head.n
        if base == 0 or head == 0:
            return "no time to compare"
        if base == head == 1:
            return "n=1, no interval"
        return f"n={head} against {base}, no {'interval' if 1 in (base, head) else 'verdict'}"


def speed_text(time_change: float | None, throughput_ratio: float | None) -> str:
    """`-4.8 %, +5.0 %, 1.050x`, in the order of `SPEED`; one `-` where nothing is known."""
    if time_change is None and throughput_ratio is None:
        return quantity.MISSING
    numbers = (quantity.change(time_change), quantity.change(less_one(throughput_ratio)))
    return ", ".join((*numbers, quantity.ratio(throughput_ratio)))


def memory_metric(cells: Sequence[Cell]) -> Metric | None:
    """The most telling memory number that all `cells` have and that means the same in each.

    A ledger's peak is of one moment or a bound, and a bound is compared with no measured peak.
    """
    mixed = len({cell.ledger_is_measured for cell in cells if cell.ledger}) > 1
    candidates = (*(m for m in MEMORY.alternatives if m is not RSS), LIVE_STORAGE, RSS)
    known = (
        metric
        for metric in candidates
        if not (mixed and metric is LEDGER_PEAK)
        and all(cell.value(metric) is not None for cell in cells)
    )
    return next(known, None) if cells else None


def less_one(ratio: float | None) -> float | None:
    """A ratio as a change."""
    return None if ratio is None else ratio - 1


def change_table(changes: Sequence[Change]) -> Table:
    """One row per change, named by its head cell.

    Besides speed, memory and loss there is what a gate requires by default, as far as a cell has
    it.
    """
    required = [
        m
        for m in METRICS
        if m.judge == "ratio" and m is not MEMORY and m.rule and m.rule.gate != "off"
    ]
    known = [m for m in required if any(change.of(m) is not None for change in changes)]
    others = "".join(f" | {metric.title} change" for metric in known)
    titles = (
        f"cell | {SPEED} | memory change | <memory metric{others} | final loss difference"
        " | final gradient norm difference | <runs"
    )
    rows = (
        (
            change.head.name,
            speed_text(change.time_change, change.throughput_ratio),
            quantity.change(change.memory_change),
            change.memory_metric.title if change.memory_metric else quantity.MISSING,
            *(quantity.change(change.of(metric)) for metric in known),
            quantity.difference(change.of(LOSS), signed=True),
            quantity.difference(change.of(GRAD_NORM), signed=True),
            change.sample_note,
        )
        for change in changes
    )
    return Table.of(titles, rows)


@dataclass(frozen=True)
class Flag:
    """One trade-off of one cell: what it is called, the numbers and the runs behind it.

    changes: the numbers by title; empty where `numbers` is a sentence.
    """

    cell: str
    verdict: str
    numbers: str
    runs: str = ""
    changes: Mapping[str, str] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """The whole flag as one phrase."""
        return f"{self.verdict}: {self.numbers}" + (f" ({self.runs})" if self.runs else "")


def flag_table(flags: Sequence[Flag]) -> Table:
    """A row per trade-off; a sentence has a column of its own."""
    titles = list(dict.fromkeys(title for flag in flags for title in flag.changes))
    sentences = ["what"] if any(not flag.changes for flag in flags) else []
    rows = (
        (
            flag.cell,
            flag.verdict,
            *(["" if flag.changes else flag.numbers] if sentences else []),
            flag.runs,
            *(flag.changes.get(title, "") for title in titles),
        )
        for flag in flags
    )
    columns = ("cell", "trade-off", *sentences, "runs", *titles)
    return Table.of(columns, rows, left=3 + len(sentences))


def threshold(metric: Metric) -> float:
    """Changes below this are not called more or less: what a gate tolerates by default."""
    return (metric.rule and metric.rule.tolerance) or 0.0


SPEED_THRESHOLD = threshold(THROUGHPUT)
MEMORY_THRESHOLD = threshold(MEMORY)


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
        moved = _loss_moved(change, (parity or {}).get(change.head.name))
        flags += [_speed_against_memory(change), Flag(change.head.name, *moved) if moved else None]
    return [flag for flag in flags if flag is not None]


def _speed_against_memory(change: Change) -> Flag | None:
    held = {m: change.of(m) for m in (change.memory_metric, LIVE_STORAGE) if m is not None}
    known = {metric: moved for metric, moved in held.items() if moved is not None}
    speed = change.throughput_change
    if speed is None or not known:
        return None
    beyond = {m: v for m, v in known.items() if abs(v) >= (threshold(m) or MEMORY_THRESHOLD)}
    more, less = (
        _measure([m.title for m, v in beyond.items() if (v > 0) == rises], known)
        for rises in (True, False)
    )
    faster, slower = speed >= SPEED_THRESHOLD, speed <= -SPEED_THRESHOLD
    if faster and more:
        verdict = f"faster, but more {more}"
    elif slower and more:
        verdict = f"slower and more {more}"
    elif slower and less:
        verdict = f"less {less}, but slower"
    elif more and less:
        verdict = f"less {less}, but more {more}"
    else:
        return None
    moved = {"throughput": speed} | {m.title: v for m, v in known.items()}
    texts = {title: quantity.change(share) for title, share in moved.items()}
    numbers = ", ".join(f"{title} {text}" for title, text in texts.items())
    return Flag(change.head.name, verdict, numbers, change.sample_note, texts)


def _measure(moved: Sequence[str], known: Collection[Metric]) -> str:
    """Memory where all of its measures moved alike, else the one that did; "" of none."""
    return "memory" if len(moved) == len(known) else "".join(moved)


def _loss_moved(change: Change, parity: ParityRow | None) -> tuple[str, str] | None:
    if parity is not None and parity.verdict == "other start":
        return parity.verdict, f"{parity.moved} began with other bits than the reference's"
    if parity is not None and parity.verdict == "diverges":
        apart = f"{quantity.difference(parity.max_relative)} (relative) at step {parity.at_step}"
        if parity.moved != "loss" and parity.norms is not None:
            first, middle = map(quantity.difference, parity.norms)
            apart = f"{first} (relative) at the first step, {middle} in the median"
        why = f"differs from the same dtype policy's reference by {apart}"
        return f"{parity.moved} moved", why
    moved = change.of(LOSS)
    # Of two policies, the coarser one's rounding is the yardstick.
    both = change.base, change.head
    bound = max(tolerance_for(cell.resolved).bound for cell in both)
    is_alike = len({cell.resolved.train.optimizer for cell in both}) == 1
    if moved is None or abs(moved) <= bound or not is_alike:
        return None
    return "loss moved", (
        f"final loss {quantity.change(moved, 2)} against {change.base.name}, more than "
        f"the coarser dtype policy's bound of {quantity.share(bound, 2)}"
    )
