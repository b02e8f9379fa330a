"""Collectives by themselves: bandwidths, their section of a report, comparing and gating them."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from recorded_runs import Recorded, findings_of, record_run, resolved_run, write_plan

from bench.derive.bandwidth import bus_factor
from bench.derive.metrics import default_rules
from bench.record import StepSample
from bench.resolve.resolution import resolve_anywhere
from bench.spec import RunSpec
from reports.comparisons.change import change_between
from reports.findings import find
from reports.frames import read_frames
from reports.gates.baseline import make_baseline, read_baseline
from reports.gates.cell_samples import cell_samples
from reports.gates.gate import gate
from reports.gates.pairing import sides_of_arms
from reports.gates.policy import Policy
from reports.nccl.expectations import shortfalls
from reports.renderers import quantity
from reports.renderers.document import Bullets, Paragraph, TableBlock
from reports.sections.cell_table import cells_section
from reports.sections.collectives import collectives_section
from reports.sections.comparison import comparison
from reports.sections.parity import parity_section
from reports.sections.what_ran import what_ran
from reports.views.cells import Run
from reports.views.sweep_view import load_sweeps


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


def logged(resolved):
    train = resolved.train.model_copy(update={"steps": 5})
    measure = resolved.measure.model_copy(update={"nccl": "evidence"})
    return resolved.model_copy(update={"train": train, "measure": measure})


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


def test_cells_that_train_are_never_compared_with_collectives(store):
    trains = {name: resolved_run(name, "no_shard") for name in ("ddp", "mfsdp")}
    found = findings_of(store, {**trains, "gather": run(collective(ranks=2))})
    assert {change.head.name for change in found.changes} == {"mfsdp"}
    assert {cell.name for cell in found.finished} == {"ddp", "mfsdp"}
    assert collectives_section(found) is not None
    assert cells_section(found) is not None


HEAD = "n1:10:20 [0] NCCL INFO "
LOG = """NCCL version 2.29.3+cuda13.0
comm 0xa0 rank 0 nranks 2 cudaDev 0 busId 1b commId 0xc - Init COMPLETE
AllReduce: opCount 0 sendbuff 0x1 recvbuff 0x2 count 1 datatype 7 op 0 root 0 comm 0xa0 [nranks=2] stream 0x5
AllReduce: 4 Bytes -> Algo RING proto LL channel{Lo..Hi}={0..1}
AllReduce: opCount 1 sendbuff 0x1 recvbuff 0x2 count 2048 datatype 7 op 0 root 0 comm 0xa0 [nranks=2] stream 0x5
AllReduce [Symmetric]: 8192 Bytes -> Kernel AllReduce_AGxLL_R nchannels 1 nthreads 512 nWorks 1
"""  # noqa: E501


def test_the_kernel_of_its_own_operation_and_size_stands_beside_the_time(store):
    timed = collective(
        operation="all_reduce", size_bytes=8192, registration="symmetric", device="cuda", ranks=2
    )
    cells = {"timed": timed, "logged": logged(timed)}
    write_plan(store, cells.items())
    for name, resolved in cells.items():
        folder = record_run(store, run(resolved, cell=name))
        if name == "logged":
            (folder.path / "nccl").mkdir()
            text = "".join(f"{HEAD}{line}\n" for line in LOG.splitlines())
            (folder.path / "nccl" / "rank0.log").write_text(text)
    found = find(store, load_sweeps(store, ["quickstart"]))
    section = collectives_section(found)
    (table,) = (block.table for block in section.blocks if isinstance(block, TableBlock))
    row = dict(zip([c.title for c in table.columns], table.rows[0].cells, strict=True))
    assert row["NCCL kernel"] == "SYMMETRIC AllReduce_AGxLL_R"
    warned = [b.text for b in what_ran(found).blocks if isinstance(b, Paragraph)]
    assert not [text for text in warned if "did not get" in text]


def test_symmetric_kernels_without_a_log_are_asked_for_in_vain():
    run = collective(registration="symmetric", device="cuda")
    (text,) = shortfalls(run, None)
    assert text.startswith("asked for symmetric kernels, and no log tells")
    (text,) = shortfalls(
        collective(registration="symmetric", device="cuda", copy_engine=True), None
    )
    assert text.startswith("asked for copy-engine gathers")
    assert shortfalls(collective(device="cuda"), None) == []


def gated(store, slower, policy=None):
    cells = {"gather": collective(size_bytes=1 << 20)}
    write_plan(store, cells.items(), sweep="gate", arms=["base", "head"], repeats=8)
    for block in range(8):
        for arm, factor in (("base", 1.0), ("head", slower)):
            time = factor * (1 + 0.001 * ((7 * block + len(arm)) % 5))
            where = {"cell": "gather", "sweep": "gate", "repeat": block, "arm": arm, "attempt": 1}
            record_run(store, run(cells["gather"], time, **where, started=None))
    return gate(sides_of_arms(store, "gate", "base", "head"), policy or Policy(), lambda _: None)


@pytest.mark.parametrize(("slower", "verdict"), [(1.0, "equivalent"), (1.2, "regressed")])
def test_a_gate_judges_the_time_and_asks_for_no_loss(store, slower, verdict):
    judged = {one.metric: one for one in gated(store, slower).judgements}
    assert judged["step_time"].verdict == verdict
    assert judged["latency"].verdict == verdict
    assert not judged["latency"].required
    assert "loss" not in judged
    assert judged["step_time"].throughput_ratio == pytest.approx(1 / slower, rel=0.01)


def test_a_policy_that_names_the_loss_of_a_collective_is_not_passed_over(store):
    rules = default_rules()
    rules["loss"] = replace(rules["loss"], named=True)
    judged = {one.metric: one for one in gated(store, 1.0, Policy(rules=rules)).judgements}
    assert (judged["loss"].verdict, judged["loss"].required) == ("unmeasured", True)
    assert "nothing is trained" in judged["loss"].reason


def test_a_baseline_keeps_microseconds(store):
    (cell,) = findings_of(store, {"gather": run(collective(size_bytes=1 << 16), 0.0109)}).cells
    baseline = make_baseline("links", "quickstart", "", [cell_samples(cell)])
    (again,) = read_baseline(json.loads(baseline.to_text()), "links").cells
    assert again.step_milliseconds[0] == pytest.approx(0.0109109, rel=1e-5)
    assert not again.curves[0].values
    assert quantity.milliseconds(again.step_milliseconds[0]) == "0.0109"


def test_a_change_of_collectives_tells_throughput_by_bandwidth(store):
    found = findings_of(
        store,
        {"slow": run(collective()), "fast": run(collective(transport="point_to_point"), 1.0)},
    )
    slow, fast = found.cells
    change = change_between(slow, fast)
    assert change.throughput_ratio == pytest.approx(2.0)
    assert change.time_change == pytest.approx(-0.5)


def test_an_export_has_their_bandwidths_and_settings(store):
    record_run(store, run(collective(operation="broadcast", size_bytes=1_000_000), 1.0))
    frames = read_frames(store.root)
    row = frames.runs.iloc[0]
    assert row["bus_bytes_per_second"] == pytest.approx(1e6 / 1.001e-3)
    assert row["engine.operation"] == "broadcast"
    assert row["latency_milliseconds_median"] == pytest.approx(3.0)
    assert frames.steps["latency_milliseconds"].notna().all()
    assert frames.steps["loss"].isna().all()
