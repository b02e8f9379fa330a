"""Clocks that move, throttling and memory errors take the times of a run away, and say why."""

from __future__ import annotations

from dataclasses import replace

import pytest
from recorded_runs import in_memory, resolved_run
from recorded_runs import sample as plain

from bench.derive.summary import summarise
from bench.record import RunRecord, StepSample

STEPS = 20


def sample(step, device, **changes) -> StepSample:
    return plain(step, 100.0 + step % 3, tokens=64, device=device, **changes)


def reading(**changes):
    return {"power_cap_watts": 700, "ecc_corrected": 0, "ecc_uncorrected": 0} | changes


def record(of_step=None, *, before=None, after=None, source="nvml", **changes) -> RunRecord:
    steady = {"sm_mhz": 1755, "throttle": []}
    steps = {
        0: [
            sample(step, {**steady, **(of_step(step) if of_step else {})}, **changes)
            for step in range(1, STEPS + 1)
        ]
    }
    report = {"source": source, "reason": "nvml: no such module", "before": before or reading()}
    report["after"] = after or reading()
    environment = {"runtime": {"devices": [report]}}
    return in_memory(steps, resolved=resolved_run(ranks=1), environment=environment)


def throttled(reason: str, first: int):
    return record(lambda step: {"throttle": [reason] if step >= first else []})


@pytest.mark.parametrize(
    ("one", "reason"),
    [
        (
            record(lambda step: {"sm_mhz": 1755 if step < 12 else 1500}),
            "rank 0 changed its clock from 1755 to 1500 MHz between the halves of the steps",
        ),
        (throttled("hw_slowdown", 15), "hw_slowdown"),
        (throttled("sw_thermal_slowdown", 20), "sw_thermal_slowdown"),
        (throttled("hw_thermal_slowdown", 20), "hw_thermal_slowdown"),
        (record(after=reading(ecc_uncorrected=1)), "may be wrong"),
        (record(after=reading(power_cap_watts=500)), "from 700 to 500 W"),
    ],
)
def test_a_device_that_did_not_stay_as_it_was_takes_the_times_away(one, reason):
    summary = summarise(one)
    assert not summary.steady.stable
    assert summary.step_milliseconds_median is None
    assert reason in summary.steady.reason
    assert f"no times: not steady, {summary.steady.reason}" in summary.notes


@pytest.mark.parametrize(
    ("one", "note"),
    [
        (record(), None),
        (record(lambda step: {"sm_mhz": 1755 - step}), None),  # 1 %
        (record(lambda step: {"sm_mhz": 300 if step == 1 else 1755}), None),  # not yet steady
        (throttled("sw_power_cap", 11), "the power cap held the clock in 50 % of readings"),
        (record(after=reading(ecc_corrected=4)), "rank 0: 4 memory errors were corrected (ECC)"),
        (
            record(lambda _: {"sm_mhz": None, "throttle": None}, source=None),
            "clocks and throttling are unknown (rank 0: nvml: no such module)",
        ),
    ],
)
def test_what_moves_little_holds_all_the_time_or_is_unknown_takes_nothing_away(one, note):
    summary = summarise(one)
    assert summary.step_milliseconds_median > 0
    told = [text for text in summary.notes if "clock" in text or "ECC" in text]
    assert told == ([] if note is None else [note])


def test_parts_of_a_step_are_those_of_the_rank_that_took_longest():
    one = record(phase_milliseconds={"forward": 30.0}, host_milliseconds=20.0)
    slow = [
        replace(s, milliseconds=200.0, phase_milliseconds={"forward": 50.0}, host_milliseconds=90.0)
        for s in one.steps[0]
    ]
    summary = summarise(replace(one, steps={0: one.steps[0], 1: slow}))
    assert summary.phase_milliseconds == {"forward": 50.0}
    assert summary.host_milliseconds_median == 90.0
