"""Arms that differ in settings: two engines in turn, as two sides of one block. No process."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from stand_in_runs import LAPTOP, StandIn, go
from sweep_texts import parse_sweep

from bench.derive.blocks import complete_blocks, is_interleaved
from bench.errors import UsageError
from bench.plan import Plan, PlannedArm
from bench.store import ResultsStore
from reports.compare.sides import sides_of_arms
from reports.views.sweep_view import load_sweeps
from sweeps.document import SweepFileError
from sweeps.planning import make_plan
from sweeps.runner import Side
from sweeps.selected_sweep import SelectedSweep

ENGINES = """\
name: a
base: {train.steps: 9}
matrix:
  product:
    case: [{label: sharded}, {label: replicated}]
arms:
  torch: {set: {engine: {name: fsdp2, strategy: optim_grads_params}}}
  ours: {set: {engine.name: mfsdp, engine.strategy: optim_grads_params}}
interleave: true
repeat: 2
overrides:
  - when: {case: replicated}
    set: {engine.strategy: no_shard}
  - when: {case: replicated, arm: torch}
    set: {engine.name: ddp}
"""


def plan_of(text: str = ENGINES, **options) -> Plan:
    definition = parse_sweep(text, "x.yaml")
    plan = make_plan(definition, LAPTOP, arms=definition.arms, **options)
    arms = [PlannedArm(arm.name, "", None, None, "2.13.0", "3.11.7") for arm in definition.arms]
    return replace(plan, arms=tuple(arms), interleaved=True)


def engines(plan: Plan, cell: str) -> dict[str, tuple[str, str]]:
    (found,) = [one for one in plan.cells if one.id == cell]
    return {arm: (run.engine.name, run.strategy) for arm, run in found.by_arm.items()}


def run_all(plan: Plan, store: ResultsStore, stand: StandIn) -> None:
    side = Side(stand, lambda resolved: f"code of {resolved.engine.name}")
    sides = {arm.name: side for arm in plan.arms}
    go(plan, store, sides)


def test_settings_of_an_arm_lie_over_those_of_each_cell_and_below_overrides() -> None:
    plan = plan_of()
    assert engines(plan, "sharded") == {
        "torch": ("fsdp2", "optim_grads_params"),
        "ours": ("mfsdp", "optim_grads_params"),
    }
    assert engines(plan, "replicated") == {
        "torch": ("ddp", "no_shard"),
        "ours": ("mfsdp", "no_shard"),
    }
    fixed = plan_of(fixed={"engine.name": "mfsdp"})  # by the command line, for every arm
    assert {name for name, _ in engines(fixed, "sharded").values()} == {"mfsdp"}


def test_the_runs_of_all_arms_survive_plan_json() -> None:
    plan = plan_of()
    assert Plan.from_document(json.loads(json.dumps(plan.to_document()))) == replace(plan, fixed={})


def test_a_cell_that_one_arm_cannot_run_is_pruned_and_the_arm_is_named() -> None:
    text = ENGINES.replace(
        "    set: {engine.strategy: no_shard}\n", "    set: {engine.strategy: optim}\n"
    )
    (pruned,) = plan_of(text).pruned
    assert (pruned.id, pruned.rule) == ("replicated", "strategy-not-in-engine")
    assert pruned.reason.startswith("arm torch: ")


def test_each_arm_runs_its_own_settings_in_complete_blocks_and_not_again(store) -> None:
    run_all(plan_of(), store, StandIn())
    ran = {(r.status.cell, r.status.arm, r.resolved.engine.name) for r in store.records(sweep="a")}
    assert ran == {
        ("replicated", "ours", "mfsdp"),
        ("replicated", "torch", "ddp"),
        ("sharded", "ours", "mfsdp"),
        ("sharded", "torch", "fsdp2"),
    }
    blocks = complete_blocks(store.records(sweep="a"))
    assert {cell: len(found) for cell, found in blocks.items()} == {"sharded": 2, "replicated": 2}
    assert all(is_interleaved(block) for found in blocks.values() for block in found)
    sides = sides_of_arms(store, "a", "torch", "ours")
    assert [(pair.label, pair.paired) for pair in sides.pairs] == [
        ("sharded", True),
        ("replicated", True),
    ]
    again = StandIn()
    run_all(plan_of(), store, again)
    assert again.seen == []


def test_arms_whose_settings_are_exchanged_run_again_and_are_not_taken_for_each_other(
    store,
) -> None:
    text = "torch".join(part.replace("torch", "ours") for part in ENGINES.split("ours"))
    for one in (ENGINES, text):
        stand, plan = StandIn(), plan_of(one)
        go(plan, store, {arm.name: Side(stand, lambda _: "one code") for arm in plan.arms})
        assert len(stand.seen) == 8
    assert engines(plan_of(text), "sharded")["torch"] == ("mfsdp", "optim_grads_params")
    wanted = {cell.id: cell.by_arm for cell in plan_of(text).cells}
    pairs = sides_of_arms(store, "a", "torch", "ours").pairs
    assert [pair.label for pair in pairs] == list(wanted)
    for pair in pairs:
        of_arms = [wanted[pair.label][arm].config_hash for arm in ("torch", "ours")]
        assert [pair.base.config_hash, pair.head.config_hash] == of_arms


def test_arms_that_run_the_same_thing_in_two_cells_stay_apart(store) -> None:
    text = ENGINES.replace(
        "    set: {engine.name: ddp}\n",
        "    set: {engine.strategy: optim_grads_params, engine.name: fsdp2}\n",
    )
    stand = StandIn()
    run_all(plan_of(text), store, stand)
    assert len(stand.seen) == 8
    (view,) = load_sweeps(store, ["a"])
    assert {cell.name: len(cell.runs) for cell in view.cells} == {
        "sharded [torch]": 2,
        "sharded [ours]": 2,
        "replicated [torch]": 2,
        "replicated [ours]": 2,
    }


def test_arms_by_settings_must_be_interleaved(tmp_path: Path) -> None:
    file = tmp_path / "x.yaml"
    file.write_text(ENGINES.replace("interleave: true\n", ""))
    with pytest.raises(UsageError, match="compared block by block"):
        SelectedSweep.of(file, LAPTOP)
    with pytest.raises(SweepFileError, match="expected one of torch, ours, found 'theirs'"):
        parse_sweep(ENGINES.replace("arm: torch}", "arm: theirs}"), "x.yaml")
