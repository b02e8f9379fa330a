"""The floor of a step: arithmetic alone plus bytes at the speed of a memory copy."""

from __future__ import annotations

import pytest
from recorded_runs import Arm, record_arms, resolved_run

from bench.errors import NothingMeasuredError
from reports.views.sweep_view import load_sweeps
from tools.floor import floor_table, floors

CELLS = {
    "alone": resolved_run("ddp", "no_shard"),
    "zero3": resolved_run("mfsdp", "optim_grads_params"),
    "copies": resolved_run("mfsdp", "no_shard"),
    "bf16": resolved_run("mfsdp", "optim_grads_params", dtype="bf16", comm="bf16"),
}


def cells_of(store, cells=CELLS):
    record_arms(store, {"torch": Arm(), "mfsdp": Arm()}, noise=0.0, blocks=2, cells=cells)
    return load_sweeps(store, ["gate"])[0].cells


def test_the_floor_is_a_rank_s_share_of_the_step_alone_and_the_bytes_it_sends(store) -> None:
    """1,000,000 bytes per rank and step; of 100 ms alone on two cores 30 are its optimizer's."""
    found = floors(cells_of(store), copied_per_second=1e8, optimizer=lambda _: 30.0)
    assert [one.cell for one in found if "copies" not in one.cell] == [
        "zero3 [torch]", "zero3 [mfsdp]",
    ]  # fmt: skip
    for one in found:
        held = 1.0 if "copies" in one.cell else 0.5
        assert one.compute_milliseconds == pytest.approx(70 + 30 * held, rel=0.02)
        assert one.transfer_milliseconds == pytest.approx(10)
        assert one.milliseconds == one.compute_milliseconds + one.transfer_milliseconds
    assert len(floor_table(found).rows) == len(found) == 4
    with pytest.raises(NothingMeasuredError, match="no cell named 'alone'"):
        floors(cells_of(store, {"zero3": CELLS["zero3"]}), 1e8, lambda _: 0.0)
