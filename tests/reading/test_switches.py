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


@pytest.mark.parametrize(
    ("switch", "value", "shown"),
    [
        ("allocator", POOL, "max_pool, 2 slots"),
        ("fine_grained_gather", {"fine_grained_gather": True}, "True"),
    ],
)
def test_one_last_bit_breaks_exactness_where_a_switch_may_not_change_any(
    store, switch, value, shown
):
    found = findings(store, {"plain": (engine(), 0.0), "other": (engine(**value), 4e-16)})
    (group,) = switch_groups(found.finished)
    assert (group.switch.name, group.switch.must_agree) == (switch, True)
    assert not group.others[0].exact
    assert 0 < group.others[0].loss < 1e-14
    section = next(s for s in build_document(found).sections if s.anchor == "switches")
    (table,) = [b.table for b in section.blocks if isinstance(b, TableBlock)]
    assert [row.kind for row in table.rows] == ["plain", "bad"]
    assert table.rows[1].cells[:3] == ("other", shown, "not the same bits")


def test_a_reducer_may_differ_and_the_report_says_by_how_much(store):
    found = findings(
        store, {"p2p": (engine(transport="point_to_point"), 0.0), "native": (engine(), 1e-6)}
    )
    (group,) = switch_groups(found.finished)
    assert group.switch.name == "transport"
    assert group.others[0].loss is not None
    assert abs(group.others[0].loss - 1e-6) < 1e-8
    section = next(s for s in build_document(found).sections if s.anchor == "switches")
    (table,) = [b.table for b in section.blocks if isinstance(b, TableBlock)]
    assert [row.kind for row in table.rows] == ["plain", "plain"]
    (sentences,) = [b for b in what_ran(found).blocks if isinstance(b, Bullets)]
    assert sentences.items[-1][1] == (
        "Reducers with fp32 gradients on the wire: point_to_point against auto: gradient norm of "
        "the first step up to 0 apart, losses up to 1.0e-06 (relative)."
    )


@pytest.mark.parametrize(
    ("shift", "text"),
    [
        (0.0, "the same bits in 2 cells."),
        (1e-9, "not the same bits in pool as in resize."),
    ],
)
def test_the_headline_says_whether_allocators_agree(store, shift, text):
    found = findings(store, {"resize": (engine(), 0.0), "pool": (engine(**POOL), shift)})
    (sentences,) = [b for b in what_ran(found).blocks if isinstance(b, Bullets)]
    assert ("", f"Allocators: losses and gradient norms have {text}") in sentences.items


@pytest.mark.parametrize("other", [{}, {"transport": "native", "overlap_param_gather": False}])
def test_cells_that_differ_in_nothing_or_in_more_than_the_switch_are_no_group(store, other):
    found = findings(store, {"a": (engine(), 0.0), "b": (engine(**other), 0.0)})
    assert switch_groups(found.finished) == []
    assert "switches" not in {s.anchor for s in build_document(found).sections}
