"""Collectives by themselves: bandwidths, their section of a report, comparing and gating them."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from recorded_runs import (
    Recorded,
    findings_of,
    found_with_log,
    logged,
    record_run,
    resolved_run,
    warnings,
    write_plan,
)

from bench.derive.bandwidth import bus_factor
from bench.derive.metrics import default_rules
from bench.record import StepSample
from bench.resolve.resolution import resolve_anywhere
from bench.spec import RunSpec
from nccl_lines import coll, init, ring, sym
from reports.comparisons.change import change_between
from reports.frames import read_frames
from reports.gates.baseline import make_baseline, read_baseline
from reports.gates.cell_samples import cell_samples
from reports.gates.gate import gate
from reports.gates.pairing import sides_of_arms
from reports.gates.policy import Policy
from reports.nccl.expectations import shortfalls
from reports.renderers import quantity
from reports.renderers.document import Bullets, TableBlock
from reports.sections.cell_table import cells_section
from reports.sections.collectives import collectives_section
from reports.sections.comparison import comparison
from reports.sections.parity import parity_section
from reports.sections.what_ran import what_ran
from reports.views.cells import Run


def collective(dtype="fp32", **changes):
    """Settings of the engine, of the launch, and the measurement."""
    launch = {"ranks": changes.pop("ranks", 4), "device": changes.pop("device", "cpu")}
    launch["copy_engine"] = changes.pop("copy_engine", False)
    return resolve_anywhere(
        RunSpec.model_validate(
            {
                "engine": {"name": "collective", **changes},
                "launch": launch,
                "dtypes": {"compute": dtype},
                "measure": {"nccl": changes.pop("nccl", "none")},
                "train": {"steps": 20},
            }
        )
    )


def run(resolved, milliseconds=2.0, **changes):
    """Rank 1 is the slowest in time, rank 2 in latency."""

    def of_step(rank, step):
        own = milliseconds * (1 + 0.001 * (step % 3)) * (1.0 if rank == 1 else 0.5)
        late = 3 * milliseconds if rank == 2 else milliseconds
        return StepSample(step, own, None, None, 0.0, 0, None, 1, None, latency_milliseconds=late)

    memory = {"rank": 0, "by_category_bytes": {"communication_buffers": 8}}
    return Recorded(resolved, samples=of_step, memory=memory, **changes)


@pytest.mark.parametrize(
    ("operation", "ranks", "factor"),
    [
        ("all_gather", 2, 0.5),
        ("all_gather", 8, 0.875),
        ("reduce_scatter", 4, 0.75),
        ("all_reduce", 2, 1.0),
        ("all_reduce", 8, 1.75),
        ("broadcast", 8, 1.0),
    ],
)
def test_bus_bandwidth_is_that_of_nccl_tests(operation, ranks, factor):
    assert bus_factor(operation, ranks) == factor


def test_the_slowest_rank_decides_time_bandwidth_and_latency(store):
    resolved = collective(operation="all_reduce", size_bytes=8_000_000)
    record_run(store, run(resolved))
    (kept,) = store.records()
    summary = Run.of(kept).summary
    assert summary.step_milliseconds_median == pytest.approx(2.002)
    assert summary.latency_milliseconds_median == pytest.approx(6.0)
    assert summary.algorithm_bytes_per_second == pytest.approx(8e6 / 2.002e-3)
    assert summary.bus_bytes_per_second == pytest.approx(1.5 * 8e6 / 2.002e-3)
    assert (summary.final_loss, summary.tokens_per_second) == (None, None)
    assert not [note for note in summary.notes if "TFLOP" in note or "tokens" in note]
    frames = read_frames(store.root)
    row = frames.runs.iloc[0]
    assert row["bus_bytes_per_second"] == pytest.approx(summary.bus_bytes_per_second)
    assert (row["engine.operation"], row["latency_milliseconds_median"]) == ("all_reduce", 6.0)
    assert frames.steps["latency_milliseconds"].notna().all()
    assert frames.steps["loss"].isna().all()


def test_a_report_of_collectives_shows_them_and_speaks_of_no_training(store):
    found = findings_of(
        store,
        {
            "gather": run(collective(size_bytes=4_000_000), 1.0),
            "direct": run(collective(size_bytes=4_000_000, transport="point_to_point"), 2.0),
        },
    )
    section = collectives_section(found)
    (table,) = (block.table for block in section.blocks if isinstance(block, TableBlock))
    titles = [column.title for column in table.columns]
    numbers = {row.cells[0]: dict(zip(titles, row.cells, strict=True)) for row in table.rows}
    assert numbers["gather"]["time (us)"] == "1,001"
    assert numbers["gather"]["latency (us)"] == "3,000"
    assert numbers["gather"]["algorithm GB/s"] == "3.996"
    assert numbers["gather"]["bus GB/s"] == "2.997"
    assert numbers["direct"]["transport"] == "point_to_point"
    assert cells_section(found) is None
    assert parity_section(found) is None
    assert comparison(found) is None
    sentences = next(b.items for b in what_ran(found).blocks if isinstance(b, Bullets))
    assert ("", "Highest bus bandwidth: all_gather 2.997 GB/s (gather).") in sentences
    change = change_between(*found.cells)
    assert change.throughput_ratio == pytest.approx(0.5)
    assert change.time_change == pytest.approx(1.0)
    # Cells that train are never compared with them.
    trains = {name: resolved_run(name, "no_shard") for name in ("ddp", "mfsdp")}
    found = findings_of(store, {**trains, "gather 2": run(collective(ranks=2))})
    assert {change.head.name for change in found.changes} == {"mfsdp"}
    assert {cell.name for cell in found.finished} == {"ddp", "mfsdp"}
    assert collectives_section(found) is not None
    assert cells_section(found) is not None


LINES = [
    *init(0, "0xa0", ranks=2),
    coll("AllReduce", "0xa0", count=1, dtype=7, ranks=2),
    ring("AllReduce", 4, "LL"),
    coll("AllReduce", "0xa0", count=2048, dtype=7, ranks=2),
    sym("AllReduce", "AllReduce_AGxLL_R", 8192, works=1),
]


def test_the_kernel_of_its_own_operation_and_size_stands_beside_the_time(store):
    asked = {"operation": "all_reduce", "size_bytes": 8192, "registration": "symmetric"}
    timed = collective(**asked, device="cuda", ranks=2)
    found = found_with_log(store, {"timed": run(timed), "logged": run(logged(timed))}, LINES)
    (table,) = (b.table for b in collectives_section(found).blocks if isinstance(b, TableBlock))
    row = dict(zip([c.title for c in table.columns], table.rows[0].cells, strict=True))
    assert row["NCCL kernel"] == "SYMMETRIC AllReduce_AGxLL_R"
    assert not [text for text in warnings(found) if "did not get" in text]
    for copy_engine, words in ((False, "symmetric kernels, and no log"), (True, "copy-engine")):
        (text,) = shortfalls(
            collective(registration="symmetric", device="cuda", copy_engine=copy_engine), None
        )
        assert text.startswith(f"asked for {words}")


def gated(store, slower):
    cells = {"gather": collective(size_bytes=1 << 20)}
    write_plan(store, cells.items(), sweep="gate", arms=["base", "head"], repeats=8)
    for block in range(8):
        for arm, factor in (("base", 1.0), ("head", slower)):
            time = factor * (1 + 0.001 * ((7 * block + len(arm)) % 5))
            where = {"cell": "gather", "sweep": "gate", "repeat": block, "arm": arm, "attempt": 1}
            record_run(store, run(cells["gather"], time, **where, started=None))
    return gate(sides_of_arms(store, "gate", "base", "head"), Policy(), lambda _: None)


@pytest.mark.parametrize(("slower", "verdict"), [(1.0, "equivalent"), (1.2, "regressed")])
def test_a_gate_judges_the_time_and_asks_for_no_loss_unless_it_is_named(store, slower, verdict):
    judged = {one.metric: one for one in gated(store, slower).judgements}
    assert judged["step_time"].verdict == verdict
    assert judged["latency"].verdict == verdict
    assert not judged["latency"].required
    assert "loss" not in judged
    named = {**default_rules(), "loss": replace(default_rules()["loss"], named=True)}
    sides = sides_of_arms(store, "gate", "base", "head")
    asked = gate(sides, Policy(rules=named), lambda _: None).judgements
    (loss,) = [one for one in asked if one.metric == "loss"]
    assert (loss.verdict, loss.required) == ("unmeasured", True)
    assert "nothing is trained" in loss.reason
    assert judged["step_time"].throughput_ratio == pytest.approx(1 / slower, rel=0.01)


def test_a_baseline_keeps_microseconds(store):
    (cell,) = findings_of(store, {"gather": run(collective(size_bytes=1 << 16), 0.0109)}).cells
    baseline = make_baseline("links", "quickstart", "", [cell_samples(cell)])
    (again,) = read_baseline(json.loads(baseline.to_text()), "links").cells
    assert again.step_milliseconds[0] == pytest.approx(0.0109109, rel=1e-5)
    assert not again.curves[0].values
    assert quantity.milliseconds(again.step_milliseconds[0]) == "0.0109"
