"""Verdicts grouped by what caused them: one place of the code, or one metric.

An added cast makes operations, copies, bytes and allocations of every cell worse. That is one
finding with its place, its cost and its cells; the rows it explains are for those who open them.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import isfinite

from bench.derive.counts import COUNTED, CountRow
from bench.derive.live_storage import risen
from bench.derive.metrics import LIVE_STORAGE, judged_metrics
from reports.compare.counts import milliseconds, site_rises
from reports.compare.judge import Judgement, Verdicts
from reports.compare.policy import AllowedRise
from reports.compare.sides import Pair
from reports.renderers import quantity

_MOST_PARTS = 3
_SHORT = {"float64": "FP64", "float32": "FP32", "bfloat16": "BF16", "float16": "FP16"}
_NOUNS = {
    "view": "views",
    "copy": "copies",
    "fill": "fills",
    "wait": "waits",
    "resize": "resizes",
    "host_read": "reads by the host",
    "python_call": "Python calls",
    "python_line": "Python lines",
    "kernel_launch": "kernel launches",
}


@dataclass(frozen=True)
class Cause:
    """Why verdicts are what they are.

    text: a sentence. rows: the judgements it explains. file, line: the place, where it is known.
    milliseconds: what it costs of a step and rank, by an estimate.
    """

    text: str
    rows: tuple[Judgement, ...]
    file: str = ""
    line: int = 0
    milliseconds: float | None = None

    @property
    def verdict(self) -> str:
        """Of all its rows."""
        return self.rows[0].verdict if self.rows else "regressed"

    @property
    def cells(self) -> list[str]:
        """Cells of its rows, each once."""
        return list(dict.fromkeys(row.cell for row in self.rows))


@dataclass
class _Place:
    """What a call site does more of, by cell and name; live: bytes it holds more, by cell."""

    line: int = 0
    rises: dict[str, dict[str, CountRow]] = field(default_factory=dict)
    live: dict[str, int] = field(default_factory=dict)
    rows: list[Judgement] = field(default_factory=list)


@lru_cache(maxsize=16)
def causes(result: Verdicts) -> tuple[Cause, ...]:
    """Of required judgements that are not equal or better: first what explains most of them.

    Places of the code, then by their metric those that have none: unmeasured, worse, undecided.
    """
    pairs = {pair.label: pair for pair in result.sides.pairs}
    places: dict[str, _Place] = {}
    rest: list[Judgement] = []
    for row in result.of("unmeasured") + result.worse + result.of("inconclusive"):
        site = _put(row, pairs[row.cell], result.policy.allowed, places)
        if site:
            places[site].rows.append(row)
        else:
            rest.append(row)
    placed = [_of_place(site, place, pairs) for site, place in places.items()]
    placed.sort(key=lambda cause: -len(cause.rows))
    return (*placed, *_by_metric(rest, len(pairs)))


def _put(
    row: Judgement, pair: Pair, allowed: Sequence[AllowedRise], places: dict[str, _Place]
) -> str:
    """Note where the rise of `row` comes from, and return the site with most of it."""
    if row.verdict != "regressed":
        return ""
    base, head = pair.base, pair.head
    if row.metric == LIVE_STORAGE.name and base.live is not None and head.live is not None:
        held = [(rise, size) for rise, size in risen(base.live, head.live) if rise.site]
        if not held or held[0][1] > sum(head.live.bytes) - sum(base.live.bytes):
            return ""  # other code holds it, as in two engines, and the rise has no one place
        largest, size = held[0]
        places.setdefault(largest.site, _Place(largest.line)).live[row.cell] = size
        return largest.site
    if not row.is_count or base.counts is None or head.counts is None:
        return ""
    rises = site_rises(row.metric, base.counts, head.counts, allowed)
    for rise in filter(lambda rise: rise.site, rises):  # a baseline keeps no call sites
        place = places.setdefault(rise.site, _Place(rise.line))
        place.rises.setdefault(row.cell, {})[rise.name] = rise
    return max(rises, key=COUNTED[row.metric][1]).site if rises else ""


def _of_place(site: str, place: _Place, pairs: Mapping[str, Pair]) -> Cause:
    file, _, function = site.partition(":")
    costs = (
        milliseconds(rows.values(), counts)
        for cell, rows in place.rises.items()
        if (counts := pairs[cell].head.counts) is not None
    )
    cost = max((ms for ms in costs if ms is not None), default=None)
    hits = list(dict.fromkeys([*place.rises, *place.live]))
    amounts = [_amounts([*place.rises.get(cell, {}).values()]) for cell in hits]
    for cell, size in place.live.items():
        amounts[hits.index(cell)]["of live storage"] = (size, True)
    parts = [_part(noun, amounts) for noun in dict.fromkeys(n for own in amounts for n in own)]
    where = f"{function or file}, line {place.line}" + (f" of {file}" if function else "")
    text = f"{where}: {quantity.few(parts, _MOST_PARTS, ', ')} more in {_cells(hits, len(pairs))}"
    if cost:
        text += f", about {quantity.significant(cost, 2)} ms of a step"
    return Cause(text, tuple(place.rows), file, place.line, cost)


def _amounts(rows: Sequence[CountRow]) -> dict[str, tuple[int, bool]]:
    """Noun -> how many more, and whether that is bytes; a cast and its way back are one.

    Without the Python that called operations among them.
    """
    amounts: dict[str, tuple[int, bool]] = {}
    for row in [row for row in rows if not row.kind.startswith("python")] or rows:
        noun, amount, in_bytes = _noun(row)
        back = _cast(*row.dtype.partition(">")[::-2]) if row.kind == "cast" else ""
        if back and row.count and amounts.get(back) == (amount, False):
            both = {back: f"{back} and back"}
            amounts = {both.get(name, name): n for name, n in amounts.items()}
            continue
        amounts[noun] = (amounts.get(noun, (0, in_bytes))[0] + amount, in_bytes)
    return amounts


def _cast(source: str, target: str) -> str:
    return f"casts from {_SHORT.get(source, source)} to {_SHORT.get(target, target)}"


def _noun(row: CountRow) -> tuple[str, int, bool]:
    """What one row is more of: events, else bytes, waits behind no compute, or allocations."""
    noun = _NOUNS.get(row.kind, row.operation)
    if row.kind == "cast":
        noun = _cast(*row.dtype.partition(">")[::2])
    if row.count > 0:
        return noun, row.count, False
    if row.bytes > 0:
        return f"of {noun}", row.bytes, True
    if row.exposed > 0:
        return f"{noun} behind no compute", row.exposed, False
    if row.allocations > 0:
        return "allocations", row.allocations, False
    return "allocated", row.allocated_bytes, True


def _part(noun: str, amounts: Sequence[Mapping[str, tuple[int, bool]]]) -> str:
    """`12 to 78 copies`, of the cells that have any."""
    known = [own[noun] for own in amounts if noun in own]
    ends = dict.fromkeys((min(known)[0], max(known)[0]))
    texts = [quantity.amount(end, "bytes" if known[0][1] else "count") for end in ends]
    return f"{' to '.join(texts)} {noun}"


def _cells(cells: Sequence[str], of: int) -> str:
    """`zero3`, `all 3 cells`, or `2 of 3 cells (ddp, zero1)`."""
    if len(cells) == 1:
        return cells[0]
    if len(cells) == of:
        return {2: "both cells"}.get(of, f"all {of} cells")
    return f"{len(cells)} of {of} cells ({quantity.few(cells, _MOST_PARTS, ', ')})"


def _by_metric(judgements: Sequence[Judgement], cells: int) -> list[Cause]:
    """What no place explains: each metric with its verdict once."""
    groups: dict[tuple[str, str], list[Judgement]] = {}
    for row in judgements:
        groups.setdefault((row.verdict, row.title), []).append(row)
    return [
        Cause(
            f"{_cells([row.cell for row in rows], cells)} {verdict}: {metric}{_changes(rows)}",
            tuple(rows),
        )
        for (verdict, metric), rows in groups.items()
    ]


def _changes(rows: Sequence[Judgement]) -> str:
    """` +9.9 % to +10.2 %`, of all rows; why, where one is infinite; "" where none is known."""
    counts = [row.head - row.base for row in rows if row.base is not None and row.head is not None]
    if rows[0].is_count and counts:
        return " " + " to ".join(dict.fromkeys(f"{n:+,.0f}" for n in (min(counts), max(counts))))
    known = [row.change for row in rows if row.change is not None]
    # No distance: the change at the last step is not what made the curves differ.
    apart = [
        row for row in rows if judged_metrics()[row.metric].judge == "curve" and not row.tolerance
    ]
    if not known or not all(map(isfinite, known)) or apart:
        reasons = (row.reason for row in apart or rows if row.change is not None and row.reason)
        return "".join(f" {reason}" for reason in itertools.islice(reasons, 1))
    exact = rows[0].time_ratio is None
    ends = (quantity.change(end, exact=exact) for end in (min(known), max(known)))
    return " " + " to ".join(dict.fromkeys(ends))
