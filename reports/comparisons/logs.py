"""Two imported runs step by step: do the losses agree, and what changed in time and memory?"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median
from typing import Any

from bench.store.imports import ImportedRun
from bench.workload import ImportedStep
from reports.comparisons.imported import counted
from reports.renderers import quantity
from reports.renderers.table import Table

CAPTION = (
    "Each side is one run. Its steps are no repetitions of it, so there is no verdict on time and "
    "no interval. Losses are compared step by step, where both logs tell one."
)


@dataclass(frozen=True)
class LogDifference:
    """Of values at the steps that both logs tell. Differences are head minus base.

    steps: how many. largest, at: the one of largest size and its step; not finite where one side
    alone is not. last: that of the last step.
    """

    name: str
    steps: int
    largest: float
    at: int
    last: float
    last_step: int


@dataclass(frozen=True)
class LogChange:
    """One number of each run."""

    name: str
    unit: str
    base: float
    head: float

    @property
    def ratio(self) -> float | None:
        """Head over base."""
        return self.head / self.base if self.base else None


_DIFFERENCES = (("loss", "loss"), ("gradient norm", "grad_norm"))
_CHANGES = (
    ("step time, median", "ms", "milliseconds"),
    ("tokens/s per device, median", "", "tokens_per_second_per_device"),
    ("TFLOP/s per device, median", "", "teraflops_per_device"),
    ("allocated peak of a device", "bytes", "device_peak_bytes"),
    ("reserved peak of a device", "bytes", "device_reserved_peak_bytes"),
)


def _told(steps: Iterable[ImportedStep], field: str) -> list[tuple[int, float]]:
    """(step, number) where the log tells it."""
    return [(one.step, value) for one in steps if (value := getattr(one, field)) is not None]


def differences(base: ImportedRun, head: ImportedRun) -> list[LogDifference]:
    """One per quantity that both logs tell at some step."""
    found = []
    for name, field in _DIFFERENCES:
        before, after = (dict(_told(run.steps, field)) for run in (base, head))
        both = sorted(before.keys() & after.keys())
        if not both:
            continue
        gaps = {step: _gap(before[step], after[step]) for step in both}
        worst = max(both, key=lambda step: abs(gaps[step]))
        found.append(LogDifference(name, len(both), gaps[worst], worst, gaps[both[-1]], both[-1]))
    return found


def changes(base: ImportedRun, head: ImportedRun) -> list[LogChange]:
    """Medians and peaks that both logs tell."""
    found = []
    for name, unit, field in _CHANGES:
        peak = unit == "bytes"
        before, after = (
            [value for _, value in _told(run.steps if peak else counted(run), field)]
            for run in (base, head)
        )
        if before and after:
            of_all = max if peak else median
            found.append(LogChange(name, unit, float(of_all(before)), float(of_all(after))))
    return found


def parity_table(found: list[LogDifference]) -> Table:
    """One row per quantity."""
    rows = (
        (
            one.name,
            f"{one.steps:,}",
            quantity.signed_difference(one.largest),
            f"{one.at:,}",
            f"{quantity.signed_difference(one.last)} (step {one.last_step:,})",
        )
        for one in found
    )
    return Table.of(" | steps in both | largest difference | at step | at the last", rows)


def change_table(found: list[LogChange]) -> Table:
    """One row per number."""
    rows = (
        (one.name, _amount(one, one.base), _amount(one, one.head), quantity.ratio(one.ratio))
        for one in found
    )
    return Table.of(" | base | head | head / base", rows)


def parity_data(base: ImportedRun, head: ImportedRun) -> dict[str, Any]:
    """As plain JSON data."""
    return {
        "differences": [vars(one) for one in differences(base, head)],
        "changes": [vars(one) | {"ratio": one.ratio} for one in changes(base, head)],
    }


def _gap(base: float, head: float) -> float:
    """Nothing where both are not finite in the same way."""
    if not math.isfinite(base) or not math.isfinite(head):
        return 0.0 if repr(base) == repr(head) else math.inf
    return head - base


def _amount(one: LogChange, value: float) -> str:
    if one.unit == "bytes":
        return quantity.binary_bytes(value)
    return f"{quantity.significant(value)} {one.unit}".rstrip()
