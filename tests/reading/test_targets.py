"""Sweeps with arms: targets met, missed or undecided, and blocks compared, as reports tell it."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from recorded_runs import CELLS, ONE, Arm, Recorded, record_arms, record_run

from bench.derive.hardware import hardware_key
from bench.store import ResultsStore
from reports.build import write_report
from reports.findings import find
from reports.gates.target_verdicts import TargetResult, judge_targets, target_table
from reports.renderers.document import Bullets, Facts, Section, TableBlock
from reports.sections.arms import arms_section, targets_section
from reports.sections.what_ran import what_ran
from reports.views.sweep_view import load_sweeps
from sweeps.definition import parse_sweep
from sweeps.document import SweepFileError


def judged(store, at_most: float, metric: str = "step_time", **arms) -> TargetResult:
    """`head` half as slow as `base`, and a target for it."""
    how = {"noise": 0.01, "blocks": 6, "cells": ONE, **arms}
    record_arms(store, {"base": Arm(), "head": Arm(slower=0.5)}, **how)
    plan = store.read_plan("gate")
    target = {"cell": "zero3", "base": "base", "head": "head", "metric": metric}
    store.write_plan("gate", plan | {"targets": [target | {"at_most": at_most}]})
    (result,) = judge_targets(store, "gate")
    return result


@pytest.mark.parametrize(
    ("at_most", "verdict"), [(0.55, "met"), (0.5, "undecided"), (0.45, "missed")]
)
def test_the_interval_of_the_ratio_decides_about_a_time(store, at_most, verdict) -> None:
    found = judged(store, at_most)
    assert found.verdict == verdict
    assert found.blocks == 6
    assert found.ratio == pytest.approx(0.5, rel=0.03)
    low, high = found.interval
    assert low < 0.5 < high
    (row,) = target_table([found]).rows
    assert row.cells[:4] == ("zero3", "step_time", verdict, f"{at_most:.2f}")
    assert re.fullmatch(r"base (99|100|101)\.\d ms", row.cells[-3])
    assert re.fullmatch(r"head (49|50|51)\.\d ms", row.cells[-2])


@pytest.mark.parametrize(
    ("at_most", "metric", "how", "verdict", "ratio", "reason"),
    [
        (
            *(0.9, "step_time", {"blocks": 3}, "undecided", 0.5),
            "too few for an interval: 3 blocks, 6 are needed",
        ),
        (0.9, "step_time", {"interleaved": False}, "undecided", 0.5, ""),
        # Memory is judged by the ratio of medians, and a number that no block has by none.
        (1.0, "rss", {"blocks": 1}, "met", 1.0, ""),
        (0.9, "rss", {"blocks": 1}, "missed", 1.0, ""),
        (1.0, "allocator_peak", {}, "unmeasured", None, "none of 6 complete blocks has a number"),
    ],
)
def test_without_an_interval_a_time_is_undecided_and_memory_is_not(
    store, at_most, metric, how, verdict, ratio, reason
) -> None:
    found = judged(store, at_most, metric, **how)
    assert (found.verdict, found.interval) == (verdict, None)
    assert found.ratio == (ratio if ratio in (None, 1.0) else pytest.approx(ratio, rel=0.05))
    assert reason in found.reason


FILE = "name: a\narms:\n  torch: .\n  ours: main\ntargets:\n  - {TARGET}\n"


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("when: {cell: '*'}, base: tosh, head: ours, at_most: {step_time: 0.5}", "torch, ours"),
        ("when: {cell: '*'}, base: torch, head: ours, at_most: {time: 0.5}", "step_time"),
        ("when: {cell: '*'}, base: torch, head: ours, at_most: {step_time: 0.0}", "above 0"),
        ("when: {cell: x}, base: torch, head: ours, at_most: {rss: 1.0}", "matches no cell"),
    ],
)
def test_a_target_that_means_nothing_is_refused_with_its_line(target: str, message: str) -> None:
    with pytest.raises(SweepFileError) as caught:
        parse_sweep(FILE.replace("TARGET", target), "x.yaml")
    assert str(caught.value).startswith("x.yaml:6: ")
    assert message in str(caught.value)


def test_a_target_may_mean_a_cell_that_the_file_includes() -> None:
    base = "when: {cell: '*'}, base: torch, head: ours, at_most: {rss: 1.0}"
    matrix = "matrix: {product: {engine.name: [ddp]}, include: [{engine.name: mfsdp}]}\n"
    target = base.replace("cell: '*'", "engine.name: mfsdp")
    ((when, _),) = parse_sweep(matrix + FILE.replace("TARGET", target), "x.yaml").targets
    assert when.patterns == {"engine.name": ("mfsdp",)}


TWO = {name: CELLS[name] for name in ("ddp", "zero3")}
TARGET = {"base": "torch", "head": "ours", "metric": "step_time"}
TARGETS = [
    TARGET | {"cell": "ddp", "at_most": 0.6},
    TARGET | {"cell": "zero3", "at_most": 0.4},
    TARGET | {"cell": "zero3", "metric": "rss", "at_most": 1.0},
]
ARMS = {"torch": Arm(), "ours": Arm(slower=0.5, more_memory=1.25, code="code-2")}


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> ResultsStore:
    """Two cells, six blocks: the arm `ours` takes half of the time. For tests that only read it."""
    store = ResultsStore.open(tmp_path_factory.mktemp("raced") / "results", create=True)
    record_arms(store, ARMS, blocks=6, cells=TWO)
    store.write_plan("gate", store.read_plan("gate") | {"targets": TARGETS})
    return store


@pytest.fixture
def raced(kept: ResultsStore, tmp_path: Path) -> ResultsStore:
    """A copy of it."""
    shutil.copytree(kept.root, tmp_path / "raced")
    return ResultsStore.open(tmp_path / "raced", create=False)


def found_in(store: ResultsStore, *sweeps: str, reference: str | None = None):
    views = load_sweeps(store, sweeps or ["gate"])
    return find(store, views, reference)


def tables(section: Section | None) -> list[list[tuple[str, ...]]]:
    assert section is not None
    return [[r.cells for r in b.table.rows] for b in section.blocks if isinstance(b, TableBlock)]


def test_every_target_is_reported_with_its_interval_and_the_missed_ones_on_top(raced):
    found = found_in(raced)
    (rows,) = tables(targets_section(found))
    assert [row[:4] for row in rows] == [
        ("ddp", "step_time", "met", "0.60"),
        ("zero3", "step_time", "missed", "0.40"),
        ("zero3", "rss", "met", "1.00"),
    ]
    low, high = map(float, rows[0][5].split(" to "))
    assert low < float(rows[0][4]) < high
    assert rows[0][-1] == "6 blocks"
    lists = [b for b in what_ran(found).blocks if isinstance(b, Bullets)]
    sentence = lists[0].items[0][1]
    assert sentence.startswith("Targets of the sweep: 2 met, 1 missed; missed: step_time of zero3 ")
    assert sentence.endswith(", at most 0.40).")


def test_html_and_markdown_hold_what_compare_prints(raced, tmp_path):
    written = write_report(raced, ["gate"], tmp_path)
    html, text = written.html.read_text(), written.markdown.read_text()
    assert '<section id="targets">' in html
    assert '<section id="arms">' in html
    result = judge_targets(raced, "gate")[1]
    interval = f"{result.interval[0]:.3f} to {result.interval[1]:.3f}"
    row = f"| zero3 | step_time | missed | 0.40 | {result.ratio:.3f} | {interval} |"
    assert row in text
    assert interval in html
    assert "## Arms, block by block" in text


def test_a_damaged_calibration_does_not_cost_the_report(raced):
    record = load_sweeps(raced, ["gate"])[0].cells[0].runs[0].record
    raced.noise.write(hardware_key(record).slug, '{"noise_version": 1}')
    section = arms_section(found_in(raced))
    times, others = tables(section)
    assert [(row[0], row[2]) for row in times] == [("ddp", "improved"), ("zero3", "improved")]
    assert all(" to " in row[4] for row in times)
    assert ("zero3", "memory (ledger peak)", "regressed") in [row[:3] for row in others]
    (remarks,) = [b for b in section.blocks if isinstance(b, Bullets)]
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
    assert [target.cell for target in found.targets] == ["gate: ddp", "gate: zero3", "gate: zero3"]


def test_arms_are_counted_in_the_order_of_the_plan_and_one_that_never_ran_is_named(store):
    record_arms(store, {"torch": Arm()}, blocks=1, cells=TWO)
    plan = store.read_plan("gate")
    store.write_plan("gate", plan | {"arms": [*plan["arms"], plan["arms"][0] | {"name": "ours"}]})
    (view,) = load_sweeps(store, ["gate"])
    assert view.arms == ("torch", "ours")
    assert view.not_run == ("ddp [ours]", "zero3 [ours]")
    (facts,) = [b for b in what_ran(find(store, [view])).blocks if isinstance(b, Facts)]
    assert facts.items[0] == ("Measured", "2 of 4 arms of cells, 1 pruned")
    record_arms(store, {"b": Arm(), "a": Arm()}, sweep="order", blocks=1, cells=TWO)
    plan = store.read_plan("order")
    store.write_plan("order", plan | {"arms": plan["arms"][::-1]})
    names = [cell.name for cell in load_sweeps(store, ["order"])[0].cells]
    assert names == ["ddp [a]", "ddp [b]", "zero3 [a]", "zero3 [b]"]


@pytest.mark.parametrize("targets", ["text", [1, None], [{"cell": 3}]])
def test_targets_that_are_nonsense_are_none(raced, targets):
    raced.write_plan("gate", raced.read_plan("gate") | {"targets": targets})
    assert judge_targets(raced, "gate") == []
