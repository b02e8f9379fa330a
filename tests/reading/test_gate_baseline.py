"""Baselines: what they keep, how they read back, and what they refuse."""

from __future__ import annotations

import json

import pytest
from recorded_runs import CELLS, Arm, on_nodes, record_arms, resolved_run

from bench.derive.metrics import STEP_TIME, MetricRule, default_rules
from bench.errors import NotComparableError, NothingMeasuredError, UsageError
from bench.spec import TrainSpec
from reports.compare.baseline import CURVE_POINTS, make_baseline, promote, read_baseline
from reports.compare.judge import judge
from reports.compare.policy import Policy
from reports.compare.sides import samples_of, sides_of_baseline

SAVED = "2026-03-01T10:00:00.000Z"


def saved(store, name: str = "main", sweep: str = "gate"):
    cells = samples_of(store, sweep)
    return make_baseline(name, sweep, SAVED, cells)


def reread(baseline):
    return read_baseline(json.loads(baseline.to_text()), "main.json")


def test_what_is_saved_reads_back(store):
    record_arms(store, {None: on_nodes("n2", "n1")}, blocks=3)
    baseline = saved(store)
    for ours, theirs in zip(baseline.cells, reread(baseline).cells, strict=True):
        assert theirs.config_hash == ours.config_hash
        times = [list(cell.of(STEP_TIME).values()) for cell in (theirs, ours)]
        assert times[0] == pytest.approx(times[1], abs=1e-3)
        assert (theirs.curves, theirs.hardware) == (ours.curves, ours.hardware)
        assert theirs.values["ledger_peak"] == ours.values["ledger_peak"]
        assert theirs.nodes == frozenset({"n1", "n2"})


def test_it_is_small_enough_to_be_reviewed_and_still_tells_bitwise_equality(store):
    train = TrainSpec(steps=400, global_batch=4, micro_batch=2, seq_len=128)
    long = {"long": resolved_run("mfsdp", "optim", train=train)}
    record_arms(store, {None: Arm()}, blocks=2, cells=long)
    text = saved(store).to_text()
    assert len(text.splitlines()) < 75
    assert len(text) < 4000
    kept = reread(saved(store))
    curve = kept.cells[0].curves["loss"][0]
    assert len(curve.steps) == CURVE_POINTS
    assert (curve.steps[0], curve.steps[-1]) == (1, 400)
    bitwise = Policy({**default_rules(), "loss": MetricRule("required", None, "both", "bitwise")})
    record_arms(store, {None: Arm(loss_shift=1e-12)}, sweep="moved", blocks=2, cells=long)
    for sweep, regressed in (("gate", []), ("moved", ["loss"])):
        sides = sides_of_baseline(store, "main", kept.cells, sweep)
        found = judge(sides, bitwise)
        assert [j.metric for j in found.of("regressed")] == regressed


def test_cells_are_matched_by_configuration(store):
    record_arms(store, {None: Arm()}, blocks=2, cells={"a": CELLS["ddp"], "b": CELLS["zero1"]})
    kept = saved(store).cells
    record_arms(store, {None: Arm()}, sweep="new", blocks=2, cells={"b": CELLS["ddp"]})
    sides = sides_of_baseline(store, "main", kept, "new")
    assert [(pair.label, pair.base.name) for pair in sides.pairs] == [("b", "a")]
    assert ("b", "only in baseline main") in sides.not_comparable


def test_other_hardware_and_lost_configurations_are_refused(store):
    record_arms(store, {None: Arm()}, blocks=2)
    record_arms(store, {None: Arm(hardware={"cpu_name": "B"})}, sweep="there", blocks=2)
    record_arms(store, {None: Arm()}, sweep="less", blocks=2, cells={"ddp": CELLS["ddp"]})
    main = saved(store)
    assert promote(main, saved(store, "x", "less"), "x").name == "x"  # more is welcome
    mixed = [one for sweep in ("gate", "there") for one in samples_of(store, sweep)]
    with pytest.raises(NotComparableError, match="different hardware: B, 2 cores"):
        make_baseline("main", "gate", SAVED, mixed)
    with pytest.raises(NothingMeasuredError):
        make_baseline("main", "gate", SAVED, [])


def test_another_schema_is_not_comparable_and_damage_is_a_usage_error(store):
    record_arms(store, {None: Arm()}, blocks=1)
    document = json.loads(saved(store).to_text())
    with pytest.raises(NotComparableError, match="baseline schema version 7"):
        read_baseline(document | {"baseline_version": 7}, "main.json")
    broken = [
        {"cells": []},
        {"cells": [{}]},
        {"hardware": None},
        {"cells": [document["cells"][0] | {"values": {"step_time": [-1.0]}}]},
        {"cells": [document["cells"][0] | {"values": {"rss": [-1.0]}}]},
        {"cells": [document["cells"][0] | {"losses": [{"digest": "x"}]}]},
    ]
    for damage in broken:
        with pytest.raises(UsageError, match="save it again"):
            read_baseline(document | damage, "main.json")
    for field, name in (("name", "<b>main</b>"), ("sweep", "../main"), ("name", "")):
        with pytest.raises(UsageError, match="expected letters, digits"):
            read_baseline(document | {field: name}, "main.json")
