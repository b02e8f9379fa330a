"""Sweeps with arms: blocks compared, as reports tell it."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path

import pytest
from recorded_runs import CELLS, Arm, Recorded, record_arms, record_run

from bench.derive.hardware import hardware_key
from bench.store import ResultsStore
from reports.build import write_report
from reports.findings import find
from reports.renderers.document import Block, Bullets, Facts, TableBlock
from reports.sections.comparison import arms_section
from reports.sections.what_ran import what_ran
from reports.views.sweep_view import load_sweeps

TWO = {name: CELLS[name] for name in ("ddp", "zero3")}
ARMS = {"torch": Arm(), "ours": Arm(slower=0.5, more_memory=1.25, code="code-2")}


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> ResultsStore:
    """Two cells, six blocks: the arm `ours` takes half of the time. For tests that only read it."""
    store = ResultsStore.open(tmp_path_factory.mktemp("raced") / "results", create=True)
    record_arms(store, ARMS, blocks=6, cells=TWO)
    return store


@pytest.fixture
def raced(kept: ResultsStore, tmp_path: Path) -> ResultsStore:
    """A copy of it."""
    shutil.copytree(kept.root, tmp_path / "raced")
    return ResultsStore.open(tmp_path / "raced", create=False)


def found_in(store: ResultsStore, *sweeps: str, reference: str | None = None):
    views = load_sweeps(store, sweeps or ["gate"])
    return find(store, views, reference)


def tables(blocks: Iterable[Block]) -> list[list[tuple[str, ...]]]:
    return [[r.cells for r in b.table.rows] for b in blocks if isinstance(b, TableBlock)]


def test_html_and_markdown_hold_what_compare_prints(raced, tmp_path):
    written = write_report(raced, ["gate"], tmp_path)
    html, text = written.html.read_text(), written.markdown.read_text()
    assert '<section id="arms">' in html
    (zero3,) = [row for row in tables(arms_section(found_in(raced)))[0] if row[0] == "zero3"]
    assert zero3[4] in html
    assert zero3[4] in text
    assert "## Arms, block by block" in text


def test_a_damaged_calibration_does_not_cost_the_report(raced):
    record = load_sweeps(raced, ["gate"])[0].cells[0].runs[0].record
    raced.noise.write(hardware_key(record).slug, '{"noise_version": 1}')
    blocks = list(arms_section(found_in(raced)))
    times, others = tables(blocks)
    assert [(row[0], row[2]) for row in times] == [("ddp", "improved"), ("zero3", "improved")]
    assert all(" to " in row[4] for row in times)
    assert ("zero3", "memory (ledger peak)", "regressed") in [row[:3] for row in others]
    (remarks,) = [b for b in blocks if isinstance(b, Bullets)]
    assert any("calibration" in text for name, text in remarks.items if name == "left out")


def test_an_arm_is_compared_with_the_first_arm_of_its_own_cell(raced):
    changes = found_in(raced).changes
    assert [(c.base.name, c.head.name) for c in changes] == [
        ("ddp [torch]", "ddp [ours]"),
        ("zero3 [torch]", "zero3 [ours]"),
    ]
    assert [c.throughput_ratio for c in changes] == pytest.approx([2, 2], rel=0.05)


def test_a_reference_that_is_named_is_what_all_arms_are_compared_with(raced):
    changes = found_in(raced, reference="ddp [ours]").changes
    assert {c.base.name for c in changes} == {"ddp [ours]"}
    assert len(changes) == 3


def test_cells_of_another_sweep_without_arms_keep_a_reference_of_their_own(raced):
    record_run(raced, Recorded(TWO["ddp"], cell="a", sweep="plain"))
    record_run(raced, Recorded(TWO["zero3"], cell="b", sweep="plain"))
    found = found_in(raced, "gate", "plain")
    assert found.reference.name == "plain: a"
    assert [c.base.name for c in found.changes][2:] == ["plain: a"]


def test_arms_are_counted_in_the_order_of_the_plan_and_one_that_never_ran_is_named(store):
    record_arms(store, {"torch": Arm()}, blocks=1, cells=TWO)
    plan = store.read_plan("gate")
    store.write_plan("gate", plan | {"arms": [*plan["arms"], plan["arms"][0] | {"name": "ours"}]})
    (view,) = load_sweeps(store, ["gate"])
    assert view.arms == ("torch", "ours")
    assert view.not_run == ("ddp [ours]", "zero3 [ours]")
    (facts,) = [b for b in what_ran(find(store, [view])) if isinstance(b, Facts)]
    assert facts.items[0] == ("Measured", "2 of 4 arms of cells, 1 pruned")
    record_arms(store, {"b": Arm(), "a": Arm()}, sweep="order", blocks=1, cells=TWO)
    plan = store.read_plan("order")
    store.write_plan("order", plan | {"arms": plan["arms"][::-1]})
    names = [cell.name for cell in load_sweeps(store, ["order"])[0].cells]
    assert names == ["ddp [a]", "ddp [b]", "zero3 [a]", "zero3 [b]"]
