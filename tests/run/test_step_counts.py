"""Counting a run: the same numbers from every launch, and no time or sample of it is counting's."""

from __future__ import annotations

import pytest

from bench.derive.counts import COUNTED, StepCounts
from bench.resolve.resolution import resolve_anywhere
from bench.spec import DtypeSpec, EngineSpec, LaunchSpec, MeasureSpec, ModelSpec, RunSpec, TrainSpec

STEPS = 3


def cell(engine: str, *, counts: bool = True):
    spec = RunSpec(
        model=ModelSpec(preset="debug"),
        engine=EngineSpec(name=engine, strategy="optim_grads_params"),
        dtypes=DtypeSpec(compute="bf16"),
        train=TrainSpec(steps=STEPS, global_batch=4, micro_batch=1, seq_len=16),
        launch=LaunchSpec(ranks=2),
        measure=MeasureSpec(counts=counts),
    )
    return resolve_anywhere(spec)


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
    assert (found.ranks, found.units, found.microbatches, found.varying) == (2, 4, 2, ())


def test_two_launches_of_the_same_code_count_the_same_to_the_digit(cells):
    assert counts(cells["mfsdp"]).rows == counts(cells["again"]).rows


def test_call_sites_are_the_engines(cells):
    casts = [row.site for row in counts(cells["mfsdp"]).rows if row.kind == "cast"]
    assert any(site.startswith("mfsdp_core/") for site in casts)
    gathers = [row.site for row in counts(cells["fsdp2"]).rows if row.kind == "collective"]
    assert any(site.startswith("torch/distributed/fsdp/") for site in gathers)


def test_counted_steps_leave_no_sample(cells):
    assert [sample.step for sample in cells["mfsdp"].samples()] == [1, 2, 3]
