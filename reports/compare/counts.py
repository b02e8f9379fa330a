"""Counts of a step, exactly: a rise fails with what rose, who called it and what it costs. Pure.

One run on each side is enough. What a policy allows by name is taken off the head's number first,
and only as far as it rose.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter

from bench.derive.counts import COUNTED, CountRow, StepCounts, added, by_name, less
from bench.derive.metrics import Metric
from reports.compare.policy import AllowedRise
from reports.renderers import quantity

MOST_NAMED = 4
_MOST_SITES = 3
VISIBLE_MILLISECONDS = 5e-4

_OfRow = Callable[[CountRow], int]


@dataclass(frozen=True)
class Rise:
    """One name that adds more to a metric than it did. allowed: how much of `amount` is wanted."""

    name: str
    amount: int
    allowed: int = 0
    reason: str = ""


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
        for rise in rises(base, head, attrgetter(amount), ())
    }
    return [
        f"the policy allows more of {one.operation}, and no cell does more of it"
        for one in allowed
        if counted and one.operation not in rose
    ]


def rises(
    base: StepCounts, head: StepCounts, of_row: _OfRow, allowed: Sequence[AllowedRise]
) -> list[Rise]:
    """Names that add more to a metric than before, the largest first."""
    before = by_name(base.rows)
    wanted = {one.operation: one for one in allowed}
    found = []
    for name, row in by_name(head.rows).items():
        old, one = before.get(name), wanted.get(name)
        amount = of_row(row) - (of_row(old) if old else 0)
        count = row.count - (old.count if old else 0)
        if amount <= 0:
            continue
        granted = 0
        if one is not None and count > 0:
            granted = int(amount * min(1.0, one.count / count))
        elif one is not None:
            granted = min(amount, one.bytes or 0)
        found.append(Rise(name, amount, granted, one.reason if one else ""))
    return sorted(found, key=lambda rise: -rise.amount)


def site_rises(
    metric: str, base: StepCounts, head: StepCounts, allowed: Sequence[AllowedRise]
) -> list[CountRow]:
    """What each call site adds to a metric: rows of the difference, of names that rose."""
    of_row = COUNTED[metric][1]
    names = {r.name for r in rises(base, head, of_row, allowed) if r.amount > r.allowed}
    before, after = (_by_site(side.rows, names) for side in (base, head))
    grown = (less(row, before.get(key)) for key, row in after.items())
    return [row for row in grown if of_row(row) > 0]


def _by_site(
    rows: Iterable[CountRow], names: Collection[str]
) -> dict[tuple[str, str, str], CountRow]:
    found: dict[tuple[str, str, str], CountRow] = {}
    for row in rows:
        if row.name in names:
            key = row.site, row.name, row.kind
            found[key] = added(found[key], row) if key in found else row
    return found


def why_risen(
    metric: Metric,
    rises: Sequence[Rise],
    base: StepCounts,
    head: StepCounts,
    allowed: Sequence[AllowedRise],
) -> str:
    """`aten._to_copy float32>bfloat16 +4 from a.py:f line 12 (+4), about 0.2 ms of a step; ...`."""
    left = [rise for rise in rises if rise.amount > rise.allowed]
    grown = site_rises(metric.name, base, head, allowed)
    texts = []
    for rise in left[:MOST_NAMED]:
        text = f"{rise.name} {size_text(metric, rise.amount - rise.allowed)}"
        if rise.allowed:
            text += f" beyond the {size_text(metric, rise.allowed)} that is allowed"
        sites = _sites(metric, (row for row in grown if row.name == rise.name))
        text += f" from {', '.join(sites)}" if sites else ""
        cost = _milliseconds(rise.name, base, head)
        text += f", about {quantity.significant(cost, 2)} ms of a step" if cost else ""
        texts.append(text)
    more = len(left) - MOST_NAMED
    return "; ".join(texts + ([f"and {more} more names"] if more > 0 else []))


def size_text(metric: Metric, amount: float) -> str:
    """`+4`, or `+4 bytes`."""
    return f"+{amount:,.0f}" + (" bytes" if metric.unit == "bytes" else "")


def _sites(metric: Metric, rows: Iterable[CountRow]) -> list[str]:
    """Who calls it more often than before; who calls it at all where the base does not say."""
    of_row = COUNTED[metric.name][1]
    grown = sorted((row for row in rows if row.site), key=lambda row: -of_row(row))
    return [
        f"{row.site} line {row.line} ({size_text(metric, of_row(row))})"
        for row in grown[:_MOST_SITES]
    ]


def _milliseconds(name: str, base: StepCounts, head: StepCounts) -> float | None:
    """What more of `name` costs per rank and step by the head's calibration."""
    after, before = by_name(head.rows).get(name), by_name(base.rows).get(name)
    if head.rates is None or after is None:
        return None
    cost = head.rates.milliseconds(after)
    cost = (cost - (head.rates.milliseconds(before) if before else 0.0)) / head.ranks
    return cost if cost > VISIBLE_MILLISECONDS else None
