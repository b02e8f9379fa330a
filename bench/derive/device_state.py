"""Whether the devices of a run stayed as they were, by what each rank has read of its own.

A clock that moves, or that the hardware holds down, changes times without any change of code. A
power cap that holds all the time is how a large GPU runs large products: it counts where the clock
moves under it, and says so otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any, Final

from bench.record import RunRecord, SteadyWindow, StepSample

#: Share by which the clock may differ between the halves of the steps that count.
CLOCK_TOLERANCE: Final = 0.03
#: Reasons of throttling that say that the machine is not as it should be.
FAULTS: Final = (
    "hw_slowdown",
    "sw_thermal_slowdown",
    "hw_thermal_slowdown",
    "hw_power_brake_slowdown",
)
POWER_CAP: Final = "sw_power_cap"
RULE: Final = f"clocks={CLOCK_TOLERANCE:.0%}"


def device_reports(record: RunRecord) -> list[dict[str, Any]]:
    """What each rank reported of its device, in rank order; empty where nothing was read."""
    devices = record.runtime.get("devices")
    return [d for d in devices if isinstance(d, dict)] if isinstance(devices, list) else []


def device_trouble(record: RunRecord, window: SteadyWindow) -> str | None:
    """Why the times of the steady steps do not stand; None where nothing says so."""
    for rank, samples in sorted(record.steps.items()):
        steady = [sample for sample in samples if window.first <= sample.step <= window.last]
        trouble = _throttled(steady) or _moved(_clocks(steady))
        if trouble:
            return f"the device of rank {rank} {trouble}"
    for rank, report in enumerate(device_reports(record)):
        trouble = _changed(report)
        if trouble:
            return f"the device of rank {rank} {trouble}"
    return None


def device_notes(record: RunRecord) -> list[str]:
    """What a reader should know of devices that does not make times worthless."""
    reports = device_reports(record)
    unknown = [
        f"rank {rank}: {report.get('reason')}"
        for rank, report in enumerate(reports)
        if report.get("source") is None
    ]
    notes = []
    if unknown:
        notes.append(f"clocks and throttling are unknown ({unknown[0]})")
    every = [_reasons(sample) for samples in record.steps.values() for sample in samples]
    read = [reasons for reasons in every if reasons is not None]
    capped = [reasons for reasons in read if POWER_CAP in reasons]
    if capped:
        share = 100 * len(capped) / len(read)
        notes.append(f"the power cap held the clock in {share:.0f} % of readings")
    for rank, report in enumerate(reports):
        rose = _rise(report, "ecc_corrected")
        if rose:
            notes.append(f"rank {rank}: {rose:g} memory errors were corrected (ECC)")
    return notes


def _clocks(samples: Sequence[StepSample]) -> list[float]:
    clocks = [(sample.device or {}).get("sm_mhz") for sample in samples]
    return [float(clock) for clock in clocks if isinstance(clock, int | float)]


def _moved(clocks: Sequence[float]) -> str | None:
    """Whether the halves have different clocks."""
    half = len(clocks) // 2
    if not half:
        return None
    early, late = median(clocks[:half]), median(clocks[-half:])
    if abs(late - early) <= CLOCK_TOLERANCE * max(early, late):
        return None
    return f"changed its clock from {early:g} to {late:g} MHz between the halves of the steps"


def _reasons(sample: StepSample) -> list[str] | None:
    reasons = (sample.device or {}).get("throttle")
    return reasons if isinstance(reasons, list) else None


def _throttled(samples: Sequence[StepSample]) -> str | None:
    for reason in FAULTS:
        steps = [sample.step for sample in samples if reason in (_reasons(sample) or ())]
        if steps:
            return f"was throttled ({reason}) in {len(steps)} of {len(samples)} steps"
    return None


def _changed(report: dict[str, Any]) -> str | None:
    if _rise(report, "ecc_uncorrected"):
        return "had memory errors that ECC could not correct, so its results may be wrong"
    before, after = (_entry(report, when, "power_cap_watts") for when in ("before", "after"))
    if before is not None and after is not None and before != after:
        return f"had its power cap changed from {before:g} to {after:g} W during the run"
    return None


def _rise(report: dict[str, Any], name: str) -> float:
    before, after = _entry(report, "before", name), _entry(report, "after", name)
    return 0.0 if before is None or after is None else max(0.0, after - before)


def _entry(report: dict[str, Any], when: str, name: str) -> float | None:
    reading = report.get(when)
    value = reading.get(name) if isinstance(reading, dict) else None
    return float(value) if isinstance(value, int | float) else None
