"""Cells that differ in one switch: which groups are made, and what is said of them."""

from __future__ import annotations

import pytest
from recorded_runs import Recorded, findings_of, resolved_run

from bench.spec import EngineSpec
from bench.store import ResultsStore
from reports.build import build_document
from reports.renderers.document import Bullets, TableBlock
from reports.sections.switches import switch_groups
from reports.sections.what_ran import what_ran


def engine(**switches) -> EngineSpec:
    return EngineSpec(name="mfsdp", strategy="optim_grads_params", **switches)


def findings(store: ResultsStore, cells: dict[str, tuple[EngineSpec, float]]):
    """`cells`: name -> engine and relative shift of every loss."""
    runs = {
        # Noise of the samples hangs on the configuration; without it losses are equal.
        name: Recorded(
            resolved_run().model_copy(update={"engine": spec}), loss_shift=shift, noise=0.0
        )
        for name, (spec, shift) in cells.items()
    }
    return findings_of(store, runs)


POOL = {"allocator": "max_pool", "double_buffer": True}
DIRECT = {"transport": "point_to_point"}
NOT_THE_SAME = "Allocators: losses and gradient norms have not the same bits in other as in plain."
SAME = "Allocators: losses and gradient norms have the same bits in 2 cells."
APART = (
    "Reducers with fp32 gradients on the wire: point_to_point against auto: gradient norm of the "
    "first step up to 0 apart, losses up to 1.0e-06 (relative)."
)


@pytest.mark.parametrize(
    ("switch", "value", "shift", "must_agree", "shown", "kind", "sentence"),
    [
        # One last bit breaks exactness where a switch may not change any.
        (
            "allocator",
            POOL,
            4e-16,
            True,
            ("max_pool, 2 slots", "not the same bits"),
            "bad",
            NOT_THE_SAME,
        ),
        ("allocator", POOL, 0.0, True, ("max_pool, 2 slots", "the same bits"), "plain", SAME),
        (
            *("fine_grained_gather", {"fine_grained_gather": True}, 4e-16, True),
            *(("True", "not the same bits"), "bad", None),
        ),
        # A reducer may differ, and the report says by how much.
        ("transport", DIRECT, 1e-6, False, ("point_to_point",), "plain", APART),
    ],
)
def test_cells_that_differ_in_one_switch_are_held_to_what_it_may_change(
    store, switch, value, shift, must_agree, shown, kind, sentence
):
    found = findings(store, {"plain": (engine(), 0.0), "other": (engine(**value), shift)})
    (group,) = switch_groups(found.finished)
    assert (group.switch.name, group.switch.must_agree) == (switch, must_agree)
    (other,) = group.others
    assert other.exact == (shift == 0)
    assert abs(other.loss) == pytest.approx(shift, rel=0.5)
    section = next(s for s in build_document(found).sections if s.anchor == "switches")
    (table,) = [b.table for b in section.blocks if isinstance(b, TableBlock)]
    assert [row.kind for row in table.rows] == ["plain", kind]
    (row,) = [row.cells for row in table.rows if row.cells[0] == other.cell.name]
    assert {*shown} <= {*row, *table.rows[1].cells}
    *_, sentences = [b for b in what_ran(found) if isinstance(b, Bullets)]
    assert sentence is None or ("", sentence) in sentences.items


@pytest.mark.parametrize(
    ("first", "other"),
    [
        ({}, {}),
        ({}, {"transport": "native", "overlap_param_gather": False}),
        # Another front is no switch, though it lacks a setting whose value the other has.
        ({"fine_grained_gather": False}, {"front": "fsdp2"}),
    ],
)
def test_cells_that_differ_in_nothing_or_in_more_than_the_switch_are_no_group(store, first, other):
    found = findings(store, {"a": (engine(**first), 0.0), "b": (engine(**other), 0.0)})
    assert switch_groups(found.finished) == []
    assert "switches" not in {s.anchor for s in build_document(found).sections}
