"""What a run asked for beside what it got: kernels by a log, and gathers in low precision."""

from __future__ import annotations

from dataclasses import replace

import pytest
from recorded_runs import Recorded, findings_of, found_with_log, logged, resolved_run, warnings

from bench.derive.summary import broken_promise
from bench.spec import EngineSpec, LaunchSpec
from nccl_lines import coll, init, ring
from reports.renderers.document import TableBlock
from reports.sections.cell_table import cell_table
from reports.sections.steps import phases_section

UB = EngineSpec(
    name="mfsdp",
    strategy="optim_grads_params",
    nccl_ub=True,
    double_buffer=True,
    allocator="fixed_pool",
)
LINES = [
    *init(0, ranks=2),
    coll("AllGather", count=64, dtype=7, ranks=2),
    ring("AllGather", 256, "LL"),
]


def cuda_run(**changes):
    return resolved_run(engine="mfsdp", launch=LaunchSpec(ranks=2, device="cuda"), **changes)


@pytest.mark.parametrize(
    ("names", "column", "warning"),
    [
        (
            *(["ub", "logged"], "AllGather REGULAR on 24 channels"),
            "ub, logged: requested symmetric kernels and did not get them: AllGather",
        ),
        (["ub"], "no log", "no log tells whether it got them"),
        (["plain"], None, None),  # who asks for nothing has no such column
    ],
)
def test_the_kernels_of_a_log_stand_beside_the_time_and_what_was_asked_in_vain_on_top(
    store, names, column, warning
):
    ub = cuda_run().model_copy(update={"engine": UB})
    known = {"ub": ub, "logged": logged(ub), "plain": cuda_run()}
    found = found_with_log(store, {name: Recorded(known[name]) for name in names}, LINES)
    table = cell_table(found)
    titles = [one.title for one in table.columns]
    shown = dict(zip(titles, table.rows[0].cells, strict=True))
    assert shown.get("NCCL kernels by log") == column
    assert [warning in text for text in warnings(found)] == ([True] if warning else [])


def test_devices_and_parts_of_steps_are_shown_with_retries_and_drift(store):
    findings = findings_of(store, {"one": cuda_run()})
    run = findings.cells[0].runs[0]
    steps = {
        rank: [
            replace(
                sample,
                milliseconds=100.0 + rank,
                phase_milliseconds={"forward": 30.0 + rank, "backward": 60.0},
                host_milliseconds=40.0,
                device={
                    "sm_mhz": 1755,
                    "throttle": ["sw_power_cap"],
                    "allocation_retries": 2,
                    "allocated_bytes": 0,
                    "reserved_bytes": sample.step << 20,
                },
            )
            for sample in samples
        ]
        for rank, samples in run.record.steps.items()
    }
    report = {"source": "nvml", "reason": "", "before": {"power_cap_watts": 700}, "after": {}}
    environment = {"runtime": {"devices": [report, report]}}
    record = replace(run.record, steps=steps, environment=environment)
    cell = replace(findings.cells[0], runs=(type(run).of(record),))
    blocks = phases_section(replace(findings, cells=[cell]))
    parts, devices = (b.table.rows[0].cells for b in blocks if isinstance(b, TableBlock))
    assert parts == ("one", "31.00", "60.00", "101.0", "40.00")
    steady = cell.measured[0].summary.steady
    assert devices == (
        "one",
        "1755 (1755 to 1755)",
        "700.0",
        "sw_power_cap",
        "2",
        f"{steady.last - steady.first}.0 MiB",
        "nvml",
    )


CODES = {"uint8": 9000, "bfloat16": 100}
WIDE = {"bfloat16": 18000}


def recorded(store, gathered, **engine):
    """What a report finds of one run."""
    spec = EngineSpec(name="mfsdp", strategy="optim_grads_params", **engine)
    resolved = resolved_run(dtype="bf16", engine=spec.name).model_copy(update={"engine": spec})
    runtime = {"python": "3.11.8", "torch": "2.13.0", "device_names": []}
    if gathered is not None:
        runtime["gathered_bytes"] = gathered
    return findings_of(store, {"one": Recorded(resolved, environment={"runtime": runtime})})


@pytest.mark.parametrize(
    ("gathered", "says"),
    [
        (WIDE, "did not get them: 100 % bfloat16 on the wire"),
        (None, "the record does not say what was gathered"),
        ({}, "the record does not say what was gathered"),
    ],
)
def test_a_broken_promise_is_in_the_headline(store, gathered, says) -> None:
    found = recorded(store, gathered, recipe="current")
    assert [says in text and text.startswith("one: ") for text in warnings(found)] == [True]
    run = found.cells[0].finished[0]
    assert any(says in note for note in run.summary.notes)


@pytest.mark.parametrize(
    ("gathered", "engine"),
    [
        (CODES, {"recipe": "mxfp8"}),
        (WIDE, {"recipe": "current", "gather_precision": "compute"}),
        (WIDE, {}),
        (None, {}),
    ],
)
def test_a_promise_that_was_kept_or_never_made_is_not(store, gathered, engine) -> None:
    found = recorded(store, gathered, **engine)
    assert not warnings(found)
    assert broken_promise(found.cells[0].finished[0].record) is None
