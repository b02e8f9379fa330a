"""Two imported logs compared step by step."""

from __future__ import annotations

import math

import pytest

from bench.store.imports import ImportedRun
from bench.workload import ImportedStep, Provenance, Workload
from reports.comparisons.imported import step_changes, step_differences


def run(*steps: ImportedStep) -> ImportedRun:
    return ImportedRun("x", Workload(framework="f"), Provenance(kind="imported"), steps)


def losses(*values: float | None, first: int = 1) -> ImportedRun:
    return run(*(ImportedStep(first + i, loss=value) for i, value in enumerate(values)))


def test_losses_are_compared_at_the_steps_that_both_logs_tell() -> None:
    (found,) = step_differences(losses(5.0, 4.0, None, 3.0), losses(4.5, 1.0, 3.0, first=2))
    assert (found.name, found.steps) == ("loss", 2)
    assert (found.largest, found.at) == (0.5, 2)
    assert (found.last, found.last_step) == (0.0, 4)
    assert step_differences(losses(1.0), losses(1.0, first=2)) == []


def test_a_side_that_diverged_differs_without_bound() -> None:
    (found,) = step_differences(losses(2.0, 1.0), losses(math.nan, 1.0))
    assert (found.largest, found.at) == (math.inf, 1)
    (same,) = step_differences(losses(math.nan), losses(math.nan))
    assert same.largest == 0.0


def test_times_are_medians_and_peaks_are_largest() -> None:
    base = run(
        *(ImportedStep(i, milliseconds=time) for i, time in enumerate((90.0, 10.0, 11.0))),
        ImportedStep(4, device_peak_bytes=100),
        ImportedStep(5, device_peak_bytes=50),
    )
    head = run(ImportedStep(1, milliseconds=5.5), ImportedStep(2, device_peak_bytes=50))
    time, peak = step_changes(base, head)
    assert (time.base, time.head, time.ratio) == (11.0, 5.5, 0.5)
    assert (peak.base, peak.ratio) == (100.0, 0.5)
    assert step_changes(base, losses(1.0)) == []


@pytest.mark.parametrize("value", [0.0])
def test_nothing_is_divided_by_nothing(value: float) -> None:
    zero = run(ImportedStep(1, milliseconds=value))
    (time,) = step_changes(zero, zero)
    assert time.ratio is None
