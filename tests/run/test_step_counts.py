"""Counts behind a run: alike in every launch, moved by slower code, no sample."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
from small_runs import small_run

from bench.derive.counts import COUNTED, StepCounts, by_name
from bench.spec import ResolvedRun
from tools.bug_in_a_copy import apply, copy_of_core

STEPS = 3
SLOW_DOWNS = Path(__file__).parent / "slow_downs"


def cell(engine: str) -> ResolvedRun:
    return small_run(
        {"name": engine, "strategy": "optim_grads_params"},
        dtypes={"compute": "bf16"},
        train={"steps": STEPS, "global_batch": 4, "seq_len": 16},
        measure={"counts": True},
    )


@pytest.fixture(scope="module")
def cells(run_cells, tmp_path_factory):
    runs = {"mfsdp": cell("mfsdp"), "again": cell("mfsdp"), "fsdp2": cell("fsdp2")}
    return run_cells(tmp_path_factory.mktemp("counts"), runs)


def counts(finished) -> StepCounts:
    return StepCounts.model_validate(finished.document("counts.json"))


@pytest.mark.parametrize("engine", ["mfsdp", "fsdp2"])
def test_every_kind_of_cost_is_counted_for_every_engine(cells, engine):
    found = counts(cells[engine])
    totals = {name: sum(map(of_row, found.rows)) for name, (_, of_row) in COUNTED.items()}
    assert totals.pop("kernel_launches") == 0  # no device
    assert all(totals.values()), totals
    assert (found.ranks, found.units, found.microbatches, found.varying) == (2, 2, 2, ())


def test_two_launches_of_the_same_code_count_the_same_to_the_digit(cells):
    assert counts(cells["mfsdp"]).rows == counts(cells["again"]).rows


def test_call_sites_are_the_engines(cells):
    casts = [row.site for row in counts(cells["mfsdp"]).rows if row.kind == "cast"]
    assert any(site.startswith("mfsdp_core/") for site in casts)
    gathers = [row.site for row in counts(cells["fsdp2"]).rows if row.kind == "collective"]
    assert any(site.startswith("torch/distributed/fsdp/") for site in gathers)


@pytest.mark.parametrize("patch", sorted(SLOW_DOWNS.glob("*.patch")), ids=lambda patch: patch.stem)
def test_a_slow_down_still_fits_the_source(tmp_path, patch):
    copy_of_core(tmp_path, patch)  # raises where it does not


def slowed(run_cells, folder, *names: str):
    """A run with these slow-downs in its core."""
    copy_of_core(folder)
    for name in names:
        apply(folder, SLOW_DOWNS / f"{name}.patch")
    (folder / "runs").mkdir()
    return run_cells(folder / "runs", {"mfsdp": cell("mfsdp")}, core=folder)["mfsdp"]


@pytest.mark.nightly
def test_slow_downs_of_one_line_are_found_by_name(cells, run_cells, tmp_path):
    slow = counts(slowed(run_cells, tmp_path, "an-extra-cast", "a-copy", "a-sleep"))
    before = by_name(counts(cells["mfsdp"]).rows)
    more = {
        name: row.count - (before[name].count if name in before else 0)
        for name, row in by_name(slow.rows).items()
    }
    assert more["aten._to_copy float32>float64"] > 0
    assert more["sleep"] > 0
    assert more["aten.clone bfloat16"] > 0
    sites = {row.operation: row.site for row in slow.rows}
    assert sites["sleep"] == "mfsdp_core/runtime/schedule.py:Schedule.show"


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_every_slow_down_is_found_by_a_gate_of_one_run_and_unchanged_code_passes(tmp_path):
    slow_downs = runpy.run_path(str(SLOW_DOWNS / "gated_slow_downs.py"))
    expected = {
        "a-copy": "copies",
        "a-gather-twice": "collectives",
        "a-kept-copy": "live_storage",
        "a-loop-over-parameters": "python_calls",
        "a-loop-that-calls-nothing": "python_lines",
        "a-lost-fusion": "operations",
        "a-lost-overlap": "exposed_waits",
        "a-sleep": "waits",
        "a-synchronous-wait": "exposed_waits",
        "a-wider-wire-dtype": "collective_bytes",
        "an-allocation-per-unit": "allocations",
        "an-extra-cast": "copies",
    }
    found = slow_downs["gated"](tmp_path / "work", [*expected, "unchanged"])
    assert set(expected) == set(slow_downs["slow_downs"]())
    for name, metric in expected.items():
        assert metric in slow_downs["found_by"](found[name]), name
    assert slow_downs["found_by"](found["unchanged"]) == {}


def test_counted_steps_leave_no_sample(cells):
    assert [sample.step for sample in cells["mfsdp"].samples()] == [1, 2, 3]
