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
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any, Literal

from bench.derive.blocks import Block, complete_blocks, is_interleaved
from bench.store import ResultsStore
from reports import quantity
from reports.cells import Run
from reports.statistics.estimate import estimate_paired
from reports.table import Column, Row, RowKind, Table

TargetVerdict = Literal["met", "missed", "undecided", "unmeasured"]

_COLUMNS = (
    Column("cell", "left"),
    Column("metric", "left"),
    Column("target, at most"),
    Column("ratio of medians"),
    Column("interval of the paired ratio"),
    Column("verdict", "left"),
    Column("base"),
    Column("head"),
    Column("runs", "left"),
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
    plan = store.read_plan(sweep)
    targets = [one for one in plan.get("targets", ()) if isinstance(one, Mapping)]
    records = [record for record in store.records(sweep=sweep) if record.status.arm]
    results = []
    for target in targets:
        arms = [str(target["base"]), str(target["head"])]
        blocks = complete_blocks(records, arms).get(str(target["cell"]), [])
        results.append(_judged(target, blocks))
    return results


def target_table(results: Sequence[TargetResult]) -> Table:
    """One row per target."""
    return Table(_COLUMNS, tuple(_row(result) for result in results))


def to_data(results: Sequence[TargetResult]) -> list[dict[str, Any]]:
    """Plain data for JSON."""
    return [asdict(result) for result in results]


def _judged(target: Mapping[str, Any], blocks: Sequence[Block]) -> TargetResult:
    base_arm, head_arm = str(target["base"]), str(target["head"])
    metric, at_most = str(target["metric"]), float(target["at_most"])
    pairs = [(_value(block[base_arm], metric), _value(block[head_arm], metric)) for block in blocks]
    values = [(b, h) for b, h in pairs if b is not None and h is not None]

    def result(verdict: TargetVerdict, reason: str = "", **numbers: Any) -> TargetResult:
        return TargetResult(
            str(target["cell"]),
            metric,
            base_arm,
            head_arm,
            at_most,
            verdict,
            reason,
            blocks=len(values),
            **numbers,
        )

    if not values:
        return result("unmeasured", f"none of {len(blocks)} complete blocks has a number")
    base, head = median(b for b, _ in values), median(h for _, h in values)
    ratio = head / base
    numbers: dict[str, Any] = {"base": base, "head": head, "ratio": ratio}
    if metric != "step_time":
        return result("met" if ratio <= at_most else "missed", **numbers)
    if not all(is_interleaved(block) for block in blocks):
        return result("undecided", "the runs were not interleaved", **numbers)
    estimate = estimate_paired([b for b, _ in values], [h for _, h in values], bootstrap=False)
    if estimate.interval is None:
        have = quantity.counted(len(values), "block")
        return result("undecided", f"too few for an interval: {have}, 6 are needed", **numbers)
    low, high = (math.exp(end) for end in estimate.interval)
    numbers["interval"] = (low, high)
    if high <= at_most:
        return result("met", **numbers)
    return result("missed" if low > at_most else "undecided", **numbers)


def _value(record: Any, metric: str) -> float | None:
    run = Run.of(record)
    if metric == "step_time":
        return run.summary.step_milliseconds_median
    if metric == "rss":
        found: Any = run.summary.rss_peak_bytes
    else:
        found = (record.memory or {}).get("cpu_allocator_peak_bytes")
        found = run.summary.device_peak_bytes if found is None else found
    return None if found is None else float(found)


def _row(result: TargetResult) -> Row:
    if result.interval is None:
        interval = quantity.MISSING
    else:
        interval = f"{result.interval[0]:.3f} to {result.interval[1]:.3f}"
    verdict = result.verdict + (f" ({result.reason})" if result.reason else "")
    texts = (
        result.cell,
        result.metric,
        f"{result.at_most:.2f}",
        quantity.MISSING if result.ratio is None else f"{result.ratio:.3f}",
        interval,
        verdict,
        f"{result.base_arm} {_amount(result, result.base)}",
        f"{result.head_arm} {_amount(result, result.head)}",
        quantity.counted(result.blocks, "block"),
    )
    return Row(texts, _KINDS[result.verdict])


def _amount(result: TargetResult, value: float | None) -> str:
    if result.metric != "step_time":
        return quantity.binary_bytes(value)
    return quantity.MISSING if value is None else f"{value:.1f} ms"
