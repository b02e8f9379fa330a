"""The kernels that a log proves stand beside the time; what was asked for in vain, on top."""

from __future__ import annotations

from dataclasses import replace

from recorded_runs import Recorded, findings_of, record_run, resolved_run, write_plan

from bench.spec import EngineSpec, LaunchSpec, MeasureSpec
from reports.findings import find
from reports.renderers.document import Paragraph, TableBlock
from reports.sections.cell_table import cell_table
from reports.sections.phases import phases_section
from reports.sections.what_ran import what_ran
from reports.views.sweep_view import load_sweeps

UB = EngineSpec(
    name="mfsdp",
    strategy="optim_grads_params",
    nccl_ub=True,
    double_buffer=True,
    allocator="fixed_pool",
)
HEAD = "n1:10:20 [0] NCCL INFO "
LOG = """NCCL version 2.29.3+cuda13.0
comm 0xa0 rank 0 nranks 2 cudaDev 0 busId 1b commId 0xc - Init COMPLETE
AllGather: opCount 1 sendbuff 0x1 recvbuff 0x2 count 64 datatype 7 op 0 root 0 comm 0xa0 [nranks=2] stream 0x5
AllGather: 256 Bytes -> Algo RING proto LL channel{Lo..Hi}={0..1}
"""  # noqa: E501


def cuda_run(**changes):
    return resolved_run(engine="mfsdp", launch=LaunchSpec(ranks=2, device="cuda"), **changes)


def filled(store, *, with_log=True):
    timed = cuda_run().model_copy(update={"engine": UB})
    train = timed.train.model_copy(update={"steps": 5})
    logged = timed.model_copy(update={"measure": MeasureSpec(nccl="evidence"), "train": train})
    cells = [("ub", timed)] + ([("ub-log", logged)] if with_log else [])
    write_plan(store, cells)
    for name, resolved in cells:
        folder = record_run(store, Recorded(resolved, cell=name))
        if name == "ub-log":
            (folder.path / "nccl").mkdir()
            text = "".join(f"{HEAD}{line}\n" for line in LOG.splitlines())
            (folder.path / "nccl" / "rank0.log").write_text(text)
    return find(store, load_sweeps(store, ["quickstart"]))


def warnings(findings):
    return [
        block.text
        for block in what_ran(findings).blocks
        if isinstance(block, Paragraph) and block.tone == "warning"
    ]


def test_the_verdict_of_a_cells_log_stands_in_the_row_of_its_time(store):
    table = cell_table(filled(store))
    column = [title.title for title in table.columns].index("NCCL kernels by log")
    row = next(row for row in table.rows if row.cells[0] == "ub")
    assert row.cells[column] == "AllGather REGULAR"


def test_what_was_asked_for_in_vain_is_said_on_top(store):
    found = warnings(filled(store))
    assert any(
        text.startswith("ub, ub-log: asked for symmetric kernels and did not get them: AllGather")
        for text in found
    )


def test_without_a_log_nothing_is_claimed(store):
    findings = filled(store, with_log=False)
    assert any("no log tells whether it got them" in text for text in warnings(findings))
    table = cell_table(findings)
    assert "no log" in table.rows[0].cells


def test_a_report_without_wishes_has_no_such_column(store):
    table = cell_table(findings_of(store, {"plain": cuda_run()}))
    assert "NCCL kernels by log" not in [title.title for title in table.columns]


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
    section = phases_section(replace(findings, cells=[cell]))
    parts, devices = (b.table.rows[0].cells for b in section.blocks if isinstance(b, TableBlock))
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
