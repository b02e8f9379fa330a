"""Which imported runs of a text are compared with which, and by how much they differ."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence

from bench.workload import ImportedStep
from reports.compare.logs import Shown, beside
from reports.compare.series import relative

Pair = tuple[Shown, Shown]
"""Base and head."""
_WORDS = r"(?:main|base(?:line)?|before|reference|master)"
# Behind a colon stands what a row of a table is called.
_BASE = re.compile(rf"^\W*{_WORDS}\b|\bmain branch\b|: {_WORDS}$", re.IGNORECASE)
_TAKEN_AWAY = re.compile(r"^\W*(?:no|without|w/o)\s+(?P<what>.+)", re.IGNORECASE)


def pairs(runs: Sequence[Shown], *, alike: bool = True) -> Iterator[Pair]:
    """Every run against the only one that is called main or base, else the nearest such one above.

    Where none is called so, against the first. Runs of a text with several are compared within it,
    columns of a table within their rows, rows with a base within those whose other words are alike,
    and where they should be alike, within a model, a sequence length and a batch.
    """
    groups: dict[tuple[object, ...], list[Shown]] = {}
    texts = Counter(run.origin for run in runs)
    rows = Counter((run.origin, run.run.provenance.lines) for run in runs if run.run)
    for run in runs:
        if run.steps:
            work = run.workload
            text = run.origin if texts[run.origin] > 1 else ""
            origin = run.run.provenance if run.run else None
            within: object = origin.lines if origin and origin.side else None
            if within and origin and rows[run.origin, origin.lines] == 1:
                within = "".join(origin.label.rpartition(origin.side)[::2])
            same = (work.model, work.seq_len, work.global_batch) if alike else ()
            groups.setdefault((text, within, *same), []).append(run)
    for (_, within, *_), group in groups.items():
        named = [run for run in group if _BASE.search(_label(run))]
        if isinstance(within, str) and not named:
            continue
        base = named[0] if len(named) == 1 else group[0]
        for run in group:
            if run in named:
                base = run
            elif run is not base and (other := _alike(run, named, base, isinstance(within, str))):
                yield _ordered(other, run)


def _alike(run: Shown, named: Sequence[Shown], base: Shown, is_row: bool) -> Shown | None:
    """Of several bases that whose name ends like this run's, else `base`, but of rows none."""
    if len(named) < 2:  # noqa: PLR2004 - one base
        return base
    ends = [(_BASE.sub("", _label(other)).strip(), other) for other in named]
    fitting = [other for end, other in ends if end and f" {_label(run)}".endswith(f" {end}")]
    differ = len({end for end, _ in ends}) > 1
    return fitting[-1] if fitting and differ else None if is_row and differ else base


def changes(pair: Pair) -> dict[str, float]:
    """Head over base of what both logs tell, by name; loss and gradient norm at an equal last step.

    time is that of a step, or the inverse of a rate.
    """
    numbers = beside(*pair).changes
    stated = {number.name.removesuffix(", median"): number.ratio for number in numbers}
    rate = stated.get("tokens/s per device")
    ratios = {
        "time": stated.get("step time") or (1 / rate if rate else None),
        "memory": stated.get("allocated peak of a device") or None,
    }
    base, head = (_last(run) for run in pair)
    if base is not None and head is not None and base.step == head.step:
        for name in ("loss", "grad_norm"):
            before, after = getattr(base, name), getattr(head, name)
            if before and after is not None:
                # Of negative numbers, too, a rise is above 1.
                ratios[name] = 1 + relative(before, after)
    return {name: ratio for name, ratio in ratios.items() if ratio is not None}


def _last(run: Shown) -> ImportedStep | None:
    steps = () if run.run is None else run.run.steps
    return next((step for step in steps[::-1] if step.loss is not None), None)


def _label(run: Shown) -> str:
    return "" if run.run is None else run.run.provenance.side or run.run.provenance.label


def _whole_label(run: Shown) -> tuple[str, str]:
    return run.origin, "" if run.run is None else run.run.provenance.label


def why_base(pair: Pair, runs: Sequence[Shown]) -> str:
    """What made the one of `pairs` of `runs` the base: its name, the other's, or its place."""
    base, head = map(_label, pair)
    if _BASE.search(base):
        equal = sum(_whole_label(run) == _whole_label(pair[0]) for run in runs)
        more = f", as {equal} runs are: the last above its head; name them apart" * (equal > 1)
        return f"called {base!r}{more}"
    if _is_taken_away(head, base):
        return f"{head!r} is without it"
    return "the first; none is called main, base or before"


def _is_taken_away(label: str, other: str) -> bool:
    """`No X` of `X`."""
    taken = _TAKEN_AWAY.match(label)
    return taken is not None and other.lower().startswith(taken["what"].lower()[:20])


def _ordered(base: Shown, head: Shown) -> Pair:
    """`No X` is what is new where `X` stands below it."""
    return (head, base) if _is_taken_away(_label(base), _label(head)) else (base, head)
