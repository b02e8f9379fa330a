"""Targets of a sweep against its records: met, missed or undecided, and the interval behind it.

                    target
    ------[====]------|---------->  ratio head / base      met: the interval ends below the target
                [=====|====]                               undecided
                      | [=====]                            missed: it begins above

Times are judged by the interval of the paired ratio over complete blocks ("Gates" in README.md);
memory, which repeats almost exactly, by the ratio of medians.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from bench.derive.blocks import Block, complete_blocks
from bench.derive.metrics import MetricRule, target_metrics
from bench.errors import UsageError
from bench.store import ResultsStore
from reports.gates.cell_samples import shared_metric
from reports.gates.gate import case_of
from reports.gates.judgement import estimated
from reports.gates.pairing import pair_of_arms
from reports.gates.policy import DEFAULT_ALPHA
from reports.renderers import quantity
from reports.renderers.table import Row, RowKind, Table
from reports.views.plan import SweepPlan, parsed_plan
from reports.views.sweep_view import SweepView

TargetVerdict = Literal["met", "missed", "undecided", "unmeasured"]

METHOD = (
    "Ratios are head over base. A time is met if the interval of the paired ratio over complete "
    "interleaved blocks ends at or below the target, missed if it begins above, else undecided; "
    "fewer than six blocks give no interval. Memory repeats almost exactly and is judged by the "
    "ratio of medians."
)
_TITLES = (
    "cell | metric | verdict | target, at most | ratio of medians | interval of the paired ratio"
    " | base | head | <runs"
)
_KINDS: Mapping[TargetVerdict, RowKind] = {
    "met": "plain",
    "missed": "bad",
    "undecided": "unsteady",
    "unmeasured": "unsteady",
}


@dataclass(frozen=True)
class TargetResult:
    """One target. base, head: medians over blocks, in ms or bytes; ratio: of these medians.

    interval: of the paired ratio at 95 %, None where so few blocks give none, or for memory.
    """

    cell: str
    metric: str
    base_arm: str
    head_arm: str
    at_most: float
    verdict: TargetVerdict
    reason: str = ""
    base: float | None = None
    head: float | None = None
    ratio: float | None = None
    interval: tuple[float, float] | None = None
    blocks: int = 0


def judge_targets(store: ResultsStore, sweep: str) -> list[TargetResult]:
    """Every target in the plan of `sweep`, in its order; none if it has none.

    Raises:
        UsageError: there is no such sweep.
    """
    plan = parsed_plan(store.read_plan(sweep))
    targets = _planned(plan)
    records = [one for one in store.records(sweep=sweep) if one.status.arm] if targets else []
    return [
        _judged(
            target,
            complete_blocks(records, [target.base, target.head]).get(target.cell, []),
        )
        for target in targets
    ]


def targets_of(store: ResultsStore, sweeps: Sequence[SweepView]) -> list[TargetResult]:
    """`judge_targets` of every sweep of a report; cells are named as in the report."""
    found = []
    for sweep in sweeps:
        prefix = f"{sweep.id}: " if len(sweeps) > 1 else ""
        try:
            results = judge_targets(store, sweep.id)
        except UsageError:  # no plan that can be read, so no targets; the report says so elsewhere
            continue
        found += [replace(result, cell=prefix + result.cell) for result in results]
    return found


def targets_sentence(results: Sequence[TargetResult]) -> str:
    """How many of the targets were met, and which were not, in one sentence."""
    counts = Counter(result.verdict for result in results)
    found = ", ".join(f"{counts[word]} {word}" for word in _KINDS if counts[word])
    missed = [
        f"{r.metric} of {r.cell} (ratio {r.ratio:.3f}, at most {r.at_most:.2f})"
        for r in results
        if r.verdict == "missed"
    ]
    return f"Targets of the sweep: {found}" + (f"; missed: {', '.join(missed)}." if missed else ".")


def target_table(results: Sequence[TargetResult]) -> Table:
    """One row per target."""
    return Table.of(_TITLES, map(_row, results), left=3)


def to_data(results: Sequence[TargetResult]) -> list[dict[str, Any]]:
    """Plain data for JSON."""
    return [asdict(result) for result in results]


class _Planned(BaseModel):
    """A target as the plan keeps it."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    cell: str
    base: str
    head: str
    metric: str
    at_most: float


def _planned(plan: SweepPlan) -> list[_Planned]:
    """Those that can be understood; a plan may be damaged."""
    found = []
    for item in plan.targets:
        with suppress(ValidationError):
            found.append(_Planned.model_validate(item))
    return found


def _judged(target: _Planned, blocks: Sequence[Block]) -> TargetResult:
    result = TargetResult(
        cell=target.cell,
        metric=target.metric,
        base_arm=target.base,
        head_arm=target.head,
        at_most=target.at_most,
        verdict="unmeasured",
        reason=f"none of {len(blocks)} complete blocks has a number",
    )
    asked = target_metrics().get(target.metric)
    if asked is None:
        return replace(result, reason=f"this version knows no metric {target.metric!r}")
    if not blocks:
        return result
    pair = pair_of_arms(target.cell, blocks, target.base, target.head)
    metric = shared_metric(asked, pair.base, pair.head)
    both = set(pair.base.of(metric)) & set(pair.head.of(metric)) if metric else set()
    if metric is None or not both:
        return result
    base, head = (median(side.of(metric)[b] for b in both) for side in (pair.base, pair.head))
    ratio = head / base if base else math.inf
    measured = replace(result, base=base, head=head, ratio=ratio, blocks=len(both), reason="")
    if metric.judge in ("ratio", "count"):
        return replace(measured, verdict="met" if ratio <= target.at_most else "missed")
    case = case_of(pair, metric, MetricRule("required", 0.0, "lower_is_better"), lambda _: None)
    why = case.why_no_ratio if pair.paired else "the runs were not interleaved"
    interval = None if why else estimated(case, DEFAULT_ALPHA).interval
    if interval is None:
        have = quantity.counted(len(both), "block")
        why = why or f"too few for an interval: {have}, 6 are needed"
        return replace(measured, verdict="undecided", reason=why)
    low, high = (math.exp(end) for end in interval)
    verdict: TargetVerdict = "missed" if low > target.at_most else "undecided"
    verdict = "met" if high <= target.at_most else verdict
    return replace(measured, verdict=verdict, interval=(low, high))


def _row(result: TargetResult) -> Row:
    if result.interval is None:
        interval = quantity.MISSING
    else:
        interval = f"{result.interval[0]:.3f} to {result.interval[1]:.3f}"
    verdict = result.verdict + (f" ({result.reason})" if result.reason else "")
    texts = (
        result.cell,
        result.metric,
        verdict,
        f"{result.at_most:.2f}",
        quantity.MISSING if result.ratio is None else f"{result.ratio:.3f}",
        interval,
        f"{result.base_arm} {_amount(result, result.base)}",
        f"{result.head_arm} {_amount(result, result.head)}",
        quantity.counted(result.blocks, "block"),
    )
    return Row(texts, _KINDS[result.verdict])


def _amount(result: TargetResult, value: float | None) -> str:
    metric = target_metrics().get(result.metric)
    if value is None or metric is None:
        return quantity.MISSING
    if metric.unit == "ms":
        return f"{quantity.milliseconds(value)} ms"
    return quantity.amount(value, metric.unit)
