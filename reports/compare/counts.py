"""Counts of a step, exactly: what rose, who called it and what it costs. Pure.

One run on each side is enough. What a policy allows by name is taken off the head's number first,
and only as far as it rose.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter

from bench.derive.counts import COUNTED, CountRow, StepCounts, added, by_name, less
from bench.derive.metrics import Metric
from reports.compare.policy import AllowedRise
from reports.renderers import quantity

MOST_NAMED = 4
_MOST_SITES = 3
_VISIBLE_MILLISECONDS = 5e-4


@dataclass(frozen=True)
class Rise:
    """One name that adds more to a metric than it did. allowed: how much of `amount` is wanted.

    row: all that it does more of.
    """

    name: str
    row: CountRow
    amount: int
    allowed: int = 0
    reason: str = ""


def rises(
    base: StepCounts,
    head: StepCounts,
    of_row: Callable[[CountRow], int],
    allowed: Sequence[AllowedRise] = (),
) -> list[Rise]:
    """Names that add more to a metric than before, the largest first."""
    before = by_name(base.rows)
    wanted = {rise.operation: rise for rise in allowed}
    grown = []
    for name, row in by_name(head.rows).items():
        more, waiver = less(row, before.get(name)), wanted.get(name)
        amount = of_row(more)
        if amount <= 0:
            continue
        granted = min(amount, waiver.bytes or 0) if waiver else 0
        if waiver and more.count > 0:
            granted = int(amount * min(1.0, waiver.count / more.count))
        grown.append(Rise(name, more, amount, granted, waiver.reason if waiver else ""))
    return sorted(grown, key=lambda rise: -rise.amount)


def unused(
    allowed: Sequence[AllowedRise], sides: Sequence[tuple[StepCounts | None, StepCounts | None]]
) -> list[str]:
    """Rises that a policy allows and no cell has: somebody should take them out."""
    counted = [(base, head) for base, head in sides if head]
    rose = {
        rise.name
        for base, head in counted
        if base is not None and head is not None
        for amount in ("count", "bytes")
        for rise in rises(base, head, attrgetter(amount))
    }
    return [
        f"the policy allows more of {rise.operation}, and no cell does more of it"
        for rise in allowed
        if counted and rise.operation not in rose
    ]


def site_rises(
    metric: str, base: StepCounts, head: StepCounts, allowed: Sequence[AllowedRise]
) -> list[CountRow]:
    """What each call site adds to a metric: rows of the difference, of names that rose."""
    of_row = COUNTED[metric][1]
    names = {r.name for r in rises(base, head, of_row, allowed) if r.amount > r.allowed}
    before, after = (
        _by_site(row for row in side.rows if row.name in names) for side in (base, head)
    )
    grown = (less(row, before.get(key)) for key, row in after.items())
    return [row for row in grown if of_row(row) > 0]


def _by_site(rows: Iterable[CountRow]) -> dict[tuple[str, str, str], CountRow]:
    sums: dict[tuple[str, str, str], CountRow] = {}
    for row in rows:
        key = row.site, row.name, row.kind
        sums[key] = added(sums[key], row) if key in sums else row
    return sums


def milliseconds(rows: Iterable[CountRow], counts: StepCounts) -> float | None:
    """What `rows` cost per rank and step by the calibration of `counts`; None of too little."""
    if counts.rates is None:
        return None
    cost = sum(map(counts.rates.milliseconds, rows)) / counts.ranks
    return cost if cost > _VISIBLE_MILLISECONDS else None


def why_risen(
    metric: Metric,
    grown: Sequence[Rise],
    base: StepCounts,
    head: StepCounts,
    allowed: Sequence[AllowedRise],
) -> str:
    """`aten._to_copy float32>bfloat16 +4 from a.py:f line 12 (+4), about 0.2 ms of a step; ...`."""
    of_row = COUNTED[metric.name][1]
    unwanted = [rise for rise in grown if rise.amount > rise.allowed]
    callers = sorted(site_rises(metric.name, base, head, allowed), key=lambda row: -of_row(row))
    texts = []
    for rise in unwanted[:MOST_NAMED]:
        text = f"{rise.name} {size_text(metric, rise.amount - rise.allowed)}"
        if rise.allowed:
            text += f" beyond the {size_text(metric, rise.allowed)} that is allowed"
        sites = [
            f"{row.site} line {row.line} ({size_text(metric, of_row(row))})"
            for row in callers
            if row.name == rise.name and row.site
        ]
        text += f" from {', '.join(sites[:_MOST_SITES])}" if sites else ""
        cost = milliseconds([rise.row], head)
        text += f", about {quantity.significant(cost, 2)} ms of a step" if cost else ""
        texts.append(text)
    more = len(unwanted) - MOST_NAMED
    return "; ".join(texts + ([f"and {more} more names"] if more > 0 else []))


def size_text(metric: Metric, amount: float) -> str:
    """`+4`, or `+4 bytes`."""
    return f"+{amount:,.0f}" + (" bytes" if metric.unit == "bytes" else "")
