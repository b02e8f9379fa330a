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


def trouble(record: RunRecord) -> str:
    summary = summarise(record)
    assert not summary.steady.stable
    assert summary.step_milliseconds_median is None
    assert f"no times: not steady, {summary.steady.reason}" in summary.notes
    return summary.steady.reason


def test_a_device_that_stays_as_it_is_takes_nothing_away():
    summary = summarise(record())
    assert summary.step_milliseconds_median > 0
    assert not any("clock" in note or "ECC" in note for note in summary.notes)


def test_a_clock_that_moves_between_the_halves_makes_a_run_unsteady():
    found = trouble(record(lambda step: {"sm_mhz": 1755 if step < 12 else 1500}))
    assert found == (
        "the device of rank 0 changed its clock from 1755 to 1500 MHz between the halves of the "
        "steps"
    )
    assert summarise(record(lambda step: {"sm_mhz": 1755 - step})).steady.stable  # 1 %


def test_a_clock_that_moves_before_the_steady_steps_does_not_matter():
    assert summarise(record(lambda step: {"sm_mhz": 300 if step == 1 else 1755})).steady.stable


@pytest.mark.parametrize("reason", ["hw_slowdown", "sw_thermal_slowdown", "hw_thermal_slowdown"])
def test_throttling_by_a_fault_makes_a_run_unsteady(reason):
    assert reason in trouble(record(lambda step: {"throttle": [reason] if step == 15 else []}))


def test_a_power_cap_that_holds_all_the_time_is_told_and_takes_nothing_away():
    summary = summarise(record(lambda step: {"throttle": ["sw_power_cap"] if step > 10 else []}))
    assert summary.step_milliseconds_median > 0
    assert "the power cap held the clock in 50 % of readings" in summary.notes


def test_errors_that_were_not_corrected_and_caps_that_changed_make_a_run_unsteady():
    assert "may be wrong" in trouble(record(after=reading(ecc_uncorrected=1)))
    assert "from 700 to 500 W" in trouble(record(after=reading(power_cap_watts=500)))
    corrected = summarise(record(after=reading(ecc_corrected=4)))
    assert "rank 0: 4 memory errors were corrected (ECC)" in corrected.notes
    assert corrected.steady.stable


def test_unknown_clocks_are_said_to_be_unknown():
    summary = summarise(record(lambda _: {"sm_mhz": None, "throttle": None}, source=None))
    assert "clocks and throttling are unknown (rank 0: nvml: no such module)" in summary.notes
    assert summary.step_milliseconds_median > 0


def test_parts_of_a_step_are_those_of_the_rank_that_took_longest():
    one = record(phase_milliseconds={"forward": 30.0}, host_milliseconds=20.0)
    slow = [
        replace(s, milliseconds=200.0, phase_milliseconds={"forward": 50.0}, host_milliseconds=90.0)
        for s in one.steps[0]
    ]
    summary = summarise(replace(one, steps={0: one.steps[0], 1: slow}))
    assert summary.phase_milliseconds == {"forward": 50.0}
    assert summary.host_milliseconds_median == 90.0
