"""The table with which a pull request refreshes golden values: per metric, what moved and where.

Differences are relative, head against base, over the steps that both have. Of times the first two
steps, which warm up, do not count.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from statistics import median
from typing import Final

from bench.derive.metrics import MEMORY, STEP_TIME
from bench.workload import ImportedRun, ImportedStep
from reports.comparisons.change import threshold
from reports.comparisons.imported import counted
from reports.renderers import quantity
from reports.renderers.table import Table

_NAMES: Final[Mapping[str, str]] = {"milliseconds": "step time", "grad_norm": "gradient norm"}
_NOT_VALUES: Final = ("step", "extra", "lines", "learning_rate")
_DIGITS: Final = 6


@dataclass(frozen=True)
class Refreshed:
    """One metric. Changes are fractions, infinite where base is zero and head is not.

    steps: of both. first: the first that differs, None if none does. largest, at: the largest
    difference and its step. middle: the median of differences. tolerance: what passes unflagged.
    """

    name: str
    steps: int
    first: int | None
    largest: float
    at: int
    middle: float
    tolerance: float

    @property
    def flag(self) -> str:
        """What a reviewer is to look at."""
        if self.first is None:
            return "equal"
        moved = self.middle if self.tolerance else self.largest
        return "review" if abs(moved) > self.tolerance else "within tolerance"


def refreshed(base: ImportedRun, head: ImportedRun) -> list[Refreshed]:
    """Every metric that both have at some step, under the names of its source."""
    series = [_series(run) for run in (base, head)]
    found = []
    for name, before in series[0].items():
        after = series[1].get(name, {})
        steps = sorted(before.keys() & after.keys())
        if steps:
            changes = {step: _change(before[step], after[step]) for step in steps}
            at = max(steps, key=lambda step: abs(changes[step]))
            first = next((step for step in steps if before[step] != after[step]), None)
            found.append(
                Refreshed(
                    _NAMES.get(name, name.replace("_", " ")),
                    len(steps),
                    first,
                    changes[at],
                    at,
                    median(changes.values()),
                    _tolerance(name),
                )
            )
    return found


def refresh_table(found: list[Refreshed]) -> Table:
    """One row per metric; differences in per cent."""
    rows = (
        (
            one.name,
            f"{one.steps:,}",
            "-" if one.first is None else f"{one.first:,}",
            quantity.change(one.largest, _DIGITS),
            f"{one.at:,}",
            quantity.change(one.middle, _DIGITS),
            one.flag,
        )
        for one in found
    )
    titles = "metric | steps | first different | largest difference | at step | median | <flag"
    return Table.of(titles, rows)


def _series(run: ImportedRun) -> dict[str, dict[int, float]]:
    found: dict[str, dict[int, float]] = {}
    timed = {step.step for step in counted(run)}
    for step in run.steps:
        own = {one.name: getattr(step, one.name) for one in fields(ImportedStep)}
        told = {name: value for name, value in own.items() if name not in _NOT_VALUES}
        told |= {name: value for name, value in step.extra.items() if isinstance(value, float)}
        for name, value in told.items():
            if value is not None and (name != "milliseconds" or step.step in timed):
                found.setdefault(name, {})[step.step] = float(value)
    return found


def _change(before: float, after: float) -> float:
    if before == after:
        return 0.0
    return (after - before) / abs(before) if before else float("inf")


def _tolerance(name: str) -> float:
    if name == "milliseconds" or "per_second" in name or "per_device" in name:
        return threshold(STEP_TIME)
    return threshold(MEMORY) if name.endswith("_bytes") else 0.0
