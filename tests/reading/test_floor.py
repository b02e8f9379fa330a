"""The floor of a step: arithmetic alone plus bytes at the speed of a memory copy."""

from __future__ import annotations

import pytest
from recorded_runs import Arm, record_arms, resolved_run

from bench.errors import NothingMeasuredError
from reports.views.sweep_view import load_sweeps
from tools.floor import (
    copy_bytes_per_second,
    floor_table,
    floors,
    optimizer_milliseconds,
)

CELLS = {
    "alone": resolved_run("ddp", "no_shard"),
    "zero3": resolved_run("mfsdp", "optim_grads_params"),
    "bf16": resolved_run("mfsdp", "optim_grads_params", dtype="bf16", comm="bf16"),
}


def cells_of(store, cells=CELLS):
    record_arms(store, {"torch": Arm(), "mfsdp": Arm()}, noise=0.0, blocks=2, cells=cells)
    return load_sweeps(store, ["gate"])[0].cells


def test_the_floor_adds_the_bytes_of_a_rank_to_the_step_alone(store) -> None:
    # 1,000,000 bytes per rank and step, 100 ms alone, two ranks on two cores.
    found = floors(cells_of(store), copied_per_second=1e8, optimizer=lambda _: 0.0)
    assert [one.cell for one in found] == ["zero3 [torch]", "zero3 [mfsdp]"]
    for one in found:
        assert one.compute_milliseconds == pytest.approx(100, rel=0.02)
        assert one.transfer_milliseconds == pytest.approx(10)
        assert one.milliseconds == one.compute_milliseconds + one.transfer_milliseconds
    assert len(floor_table(found).rows) == 2


def test_a_rank_is_charged_for_the_optimizer_state_that_it_holds(store) -> None:
    """Of 100 ms alone 30 are its optimizer's; ZeRO-3 on two ranks updates half of the weights."""
    cells = CELLS | {"copies": resolved_run("mfsdp", "no_shard")}
    found = {
        one.cell.partition(" [")[0]: one
        for one in floors(cells_of(store, cells), 1e8, lambda _: 30.0)
    }
    assert found["zero3"].optimizer_milliseconds == pytest.approx(15, rel=0.02)
    assert found["zero3"].compute_milliseconds == pytest.approx(85, rel=0.02)
    assert found["copies"].compute_milliseconds == pytest.approx(100, rel=0.02)


def test_an_optimizer_step_has_a_time() -> None:
    assert 0.01 < optimizer_milliseconds(CELLS["alone"]) < 60_000


def test_cells_of_other_dtypes_have_no_floor(store) -> None:
    assert not [one for one in floors(cells_of(store), 1e8, lambda _: 0.0) if "bf16" in one.cell]


def test_without_a_step_alone_there_is_no_floor(store) -> None:
    with pytest.raises(NothingMeasuredError, match="no cell named 'alone'"):
        floors(cells_of(store, {"zero3": CELLS["zero3"]}), 1e8, lambda _: 0.0)


def test_a_copy_has_a_speed() -> None:
    assert copy_bytes_per_second() > 1e7
