"""What changed between a base and a head cell, and what an author may leave out of it.

Of speed there are always three named numbers, never one.

"5 % faster" can mean 5 % less time (1.053x the throughput) or 5 % more throughput (4.8 % less
time); published evidence has been read both ways. So time change, throughput change and ratio
appear together and by name.

`change_table` shows them in reports. Trade-offs are speed bought with memory, memory bought with
time, and a loss that moved.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

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
from reports.renderers import quantity
from reports.renderers.table import Table
from reports.views.cells import Cell


@dataclass(frozen=True)
class Change:
    """Head against base; fractions (0.05 is +5 %), None where a side has no number.

    time_change: head time / base time - 1. throughput_change: head tokens/s / base tokens/s - 1.
    throughput_ratio: head tokens/s / base tokens/s.
    loss_difference, norm_difference: of final losses and gradient norms, (head - base) / |base|.
    memory_change is of `memory_metric`. others: of `other_metrics`, by name.
    """

    base: Cell
    head: Cell
    time_change: float | None
    throughput_change: float | None
    throughput_ratio: float | None
    memory_metric: Metric | None
    memory_change: float | None
    others: Mapping[str, float | None]
    loss_difference: float | None
    norm_difference: float | None

    @property
    def sample_note(self) -> str:
        """How many runs stand behind the times, and what follows from it."""
        base, head = self.base.n, self.head.n
        if base == 0 or head == 0:
            return "no time to compare"
        if min(base, head) == 1:
            return "n=1, no interval" if base == head else f"n={head} against {base}, no interval"
        return f"n={head} against {base}, no verdict"


SPEED = "time change, throughput change, throughput ratio"
"""Title of the column that `speed_text` fills: one change, said once."""


def speed_text(time_change: float | None, throughput_ratio: float | None) -> str:
    """`-4.8 %, +5.0 %, 1.050x`, in the order of `SPEED`; one `-` where nothing is known."""
    if time_change is None and throughput_ratio is None:
        return quantity.MISSING
    numbers = (quantity.change(time_change), quantity.change(less_one(throughput_ratio)))
    return ", ".join((*numbers, quantity.ratio(throughput_ratio)))


def other_metrics() -> list[Metric]:
    """What stands beside speed, memory and loss: whatever a gate requires by default."""
    return [
        m
        for m in METRICS
        if m.judge == "ratio" and m is not MEMORY and m.rule and m.rule.gate != "off"
    ]


def change_between(base: Cell, head: Cell) -> Change:
    """Compare medians over the runs of both cells.

    Throughput follows from the times: of an even number of runs the median of tokens/s is not
    tokens over the median of times, and time, throughput and ratio would contradict each other.
    """
    time = _ratio(base, head, STEP_TIME)
    tokens = head.resolved.tokens_per_step / base.resolved.tokens_per_step
    throughput = tokens / time if time else None
    metric = memory_metric([base, head])
    return Change(
        base=base,
        head=head,
        time_change=less_one(time),
        throughput_change=less_one(throughput),
        throughput_ratio=throughput,
        memory_metric=metric,
        memory_change=None if metric is None else less_one(_ratio(base, head, metric)),
        others={m.name: less_one(_ratio(base, head, m)) for m in other_metrics()},
        loss_difference=_difference(base, head, LOSS),
        norm_difference=_difference(base, head, GRAD_NORM),
    )


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


def _ratio(base: Cell, head: Cell, metric: Metric) -> float | None:
    before, after = base.value(metric), head.value(metric)
    return after / before if before and after is not None else None


def less_one(ratio: float | None) -> float | None:
    """A ratio as a change."""
    return None if ratio is None else ratio - 1


def _difference(base: Cell, head: Cell, metric: Metric) -> float | None:
    before, after = base.value(metric), head.value(metric)
    if before is None or after is None or before == 0:
        return None
    return (after - before) / abs(before)


def change_table(changes: Sequence[Change]) -> Table:
    """One row per change, named by its head cell; what no cell has is left out."""
    known = [
        metric
        for metric in other_metrics()
        if any(change.others[metric.name] is not None for change in changes)
    ]
    others = "".join(f" | {metric.title} change" for metric in known)
    titles = (
        f"cell | {SPEED} | memory change | <memory metric{others} | final loss difference"
        " | final gradient norm difference | <runs"
    )
    return Table.of(titles, (_row(change, known) for change in changes))


def _row(change: Change, others: Sequence[Metric]) -> tuple[str, ...]:
    return (
        change.head.name,
        speed_text(change.time_change, change.throughput_ratio),
        quantity.change(change.memory_change),
        change.memory_metric.title if change.memory_metric else quantity.MISSING,
        *(quantity.change(change.others[metric.name]) for metric in others),
        quantity.difference(change.loss_difference, signed=True),
        quantity.difference(change.norm_difference, signed=True),
        change.sample_note,
    )


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
    return Table.of(
        ("cell", "trade-off", *sentences, "runs", *titles), rows, left=3 + len(sentences)
    )


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
        flags.extend(_flags(change, (parity or {}).get(change.head.name)))
    return flags


def _flags(change: Change, parity: ParityRow | None) -> list[Flag]:
    moved = _loss_moved(change, parity)
    found = [_speed_against_memory(change), Flag(change.head.name, *moved) if moved else None]
    return [flag for flag in found if flag is not None]


def _speed_against_memory(change: Change) -> Flag | None:
    held = {LIVE_STORAGE: change.others.get(LIVE_STORAGE.name)}
    if change.memory_metric is not None:
        held = {change.memory_metric: change.memory_change} | held
    known = {metric: moved for metric, moved in held.items() if moved is not None}
    speed = change.throughput_change
    if speed is None or not known:
        return None
    beyond = {m: v for m, v in known.items() if abs(v) >= (threshold(m) or MEMORY_THRESHOLD)}
    more, less = (
        [m.title for m, v in beyond.items() if (v > 0) == rises] for rises in (True, False)
    )
    faster, slower = speed >= SPEED_THRESHOLD, speed <= -SPEED_THRESHOLD
    if faster and more:
        verdict = "faster, but more memory"
    elif slower and more:
        verdict = "slower and more memory"
    elif slower and less:
        verdict = "less memory, but slower"
    elif more and less:
        verdict = f"less {less[0]}, but more {more[0]}"
    else:
        return None
    moved = {"throughput": speed} | {m.title: v for m, v in known.items()}
    texts = {title: quantity.change(one) for title, one in moved.items()}
    numbers = ", ".join(f"{title} {text}" for title, text in texts.items())
    return Flag(change.head.name, verdict, numbers, change.sample_note, texts)


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
