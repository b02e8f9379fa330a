"""What stands for what: runs for a cell, a plan for a sweep, and a cell for all others."""

from __future__ import annotations

import dataclasses
import re

import pytest
from recorded_runs import Recorded, record_run, resolved_run, write_plan

from bench.derive.metrics import LOSS, STEP_TIME
from bench.errors import UsageError
from bench.record import STOPPED
from bench.spec import DataSpec, ResolvedRun
from bench.store import ResultsStore
from reports.views.cells import Run, make_cell
from reports.views.reference import choose_reference, rule_for
from reports.views.sweep_view import load_sweeps

A, B, C = (resolved_run("ddp", "no_shard", ranks=n) for n in (1, 2, 4))


def load(store, *sweeps):
    return load_sweeps(store, sweeps or ["quickstart"])


def test_cells_come_in_the_order_of_the_plan_and_those_without_a_run_are_named(store):
    write_plan(store, [("first", A), ("second", B), ("third", C)])
    record_run(store, Recorded(B, cell="second"))
    record_run(store, Recorded(A, cell="first"))
    view = load(store)[0]
    assert [cell.name for cell in view.cells] == ["first", "second"]
    assert (view.not_run, view.planned) == (("third",), 3)


def test_runs_are_matched_by_configuration_though_their_status_is_lost_and_others_counted(store):
    write_plan(
        store,
        [("new-name", A)],
        pruned=[{"id": "p", "labels": {}, "rule": "too_few_devices", "reason": "needs 8"}],
        duplicates=[{"id": "d", "labels": {}, "same_as": "new-name", "reason": "same"}],
    )
    folder = record_run(store, Recorded(A, cell="old-name"))
    record_run(store, Recorded(B, cell="gone"))
    (folder.path / "status.json").unlink()
    unreadable = record_run(store, Recorded(C, cell="new-name"))
    (unreadable.path / "spec.json").write_text("not json")
    view = load(store)[0]
    assert ([cell.name for cell in view.cells], view.stale) == (["new-name"], 1)
    assert view.cells[0].runs[0].kind == "damaged"
    assert any(unreadable.run_id in text for text in view.problems)
    assert [(c.id, c.rule) for c in view.pruned] == [("p", "too_few_devices")]
    assert (view.pruned[0].reason, view.merged) == ("needs 8", (("d", "new-name"),))


def test_a_configuration_is_named_a_few_times_per_run_however_many_cells_there_are(
    store, monkeypatch
):
    cells = [
        (f"cell-{seed}", resolved_run("ddp", "no_shard", data=DataSpec(kind="text", seed=seed)))
        for seed in range(12)
    ]
    write_plan(store, cells)
    for name, resolved in cells:
        record_run(store, Recorded(resolved, cell=name))
    named, text = [], ResolvedRun.canonical_json
    monkeypatch.setattr(ResolvedRun, "canonical_json", lambda run: named.append(run) or text(run))
    assert len(load(store)[0].cells) == 12
    assert len(named) <= 5 * 12


def test_a_damaged_plan_falls_back_to_the_runs_and_says_so(store):
    write_plan(store, [("first", A)])
    record_run(store, Recorded(A, cell="first"))
    (store.root / "sweeps" / "quickstart" / "plan.json").write_text('{"cells": [')
    view = load(store)[0]
    assert [cell.name for cell in view.cells] == ["first"]
    assert any("plan of quickstart" in text for text in view.problems)


@pytest.mark.parametrize("cells", ["text", [1, None], [{"id": 3}], {"id": "x"}])
def test_a_plan_with_nonsense_in_it_does_not_stop_the_report(store, cells):
    store.write_plan("quickstart", {"cells": cells, "pruned": cells, "duplicates": cells})
    record_run(store, Recorded(A, cell="first"))
    load(store)


RUN = resolved_run("ddp", "no_shard")


def records(store, *runs):
    for index, run in enumerate(runs):
        record_run(store, dataclasses.replace(run, started=f"2026-03-01T10:00:{index:02}.000Z"))
    return list(store.records())


@pytest.mark.parametrize(
    ("runs", "n", "superseded"),
    [
        ([Recorded(RUN, repeat=i) for i in range(3)], 3, 0),  # repeats are replicates
        ([Recorded(RUN, code="old", speed=9.0), Recorded(RUN, code="new")], 1, 1),
        # A retried failure gives way; a finished run is not lost to a later interrupted one.
        ([Recorded(RUN, state="crashed", reason="x"), Recorded(RUN)], 1, 1),
        ([Recorded(RUN), Recorded(RUN, state="interrupted", steps=3)], 1, 1),
    ],
)
def test_the_newest_code_and_of_each_repeat_what_finished_stand_for_a_cell(
    store, runs, n, superseded
):
    cell = make_cell("c", records(store, *runs))
    assert (cell.n, cell.superseded) == (n, superseded)
    assert cell.runs[0].record.status.code == runs[-1].code


def test_the_cells_number_is_the_median_over_its_runs(store):
    made = records(store, *(Recorded(RUN, repeat=i, speed=1.0 + i) for i in range(3)))
    cell = make_cell("c", made)
    times = sorted(cell.values(STEP_TIME))
    assert cell.value(STEP_TIME) == times[1]
    newer = make_cell("d", records(store, Recorded(RUN, speed=9.0), Recorded(RUN, seed=3))[-2:])
    assert newer.value(STEP_TIME) < 400  # the newer of two runs counts


def without_its_status(folder):
    (folder.path / "status.json").write_text("{")


def cut_off(folder):
    path = folder.path / "steps.node0.jsonl"
    path.write_text(path.read_text()[:-100])


@pytest.mark.parametrize(
    ("run", "damage", "kind"),
    [
        (Recorded(RUN), cut_off, "damaged"),
        (Recorded(RUN), without_its_status, "damaged"),
        # A run that was killed may well have a last line cut off.
        (Recorded(RUN, state="crashed", reason="killed", steps=5), cut_off, "failed"),
        *(
            (Recorded(RUN, state=state, reason="by the user", steps=5), None, "stopped")
            for state in sorted(STOPPED)
        ),
    ],
)
def test_damage_outranks_success_and_an_end_from_outside_is_no_failure(store, run, damage, kind):
    folder = record_run(store, run)
    if damage is not None:
        damage(folder)
    cell = make_cell("c", store.records())
    assert (cell.runs[0].kind, cell.n, cell.value(LOSS)) == (kind, 0, None)


@pytest.mark.parametrize(("engine", "more"), [("ddp", ", residual stream fp32"), ("mfsdp", "")])
def test_a_cell_under_autocast_says_what_its_residual_stream_is(store, engine, more):
    run = resolved_run(engine=engine, dtype="bf16")
    cell = make_cell("c", records(store, Recorded(run)))
    assert (cell.dtypes, cell.residual_stream) == ("bf16, main fp32", more)


def test_a_run_that_drifts_has_no_time_and_one_that_runs_is_neither_finished_nor_failed(store):
    made = records(store, Recorded(RUN, milliseconds=lambda step: 100 * 1.06**step))
    run = make_cell("c", made).runs[0]
    assert (run.kind, run.finished) == ("unsteady", True)
    with store.new_run(RUN, sweep="s", cell="c", repeat=0, arm=None, code="x"):
        (record,) = store.records(sweep="s")
        assert Run.of(record).kind == "running"


def usable(cell):
    return cell.n > 0


@pytest.mark.parametrize(
    ("among", "named", "expected"),
    [
        ("", None, "ddp-fp32"),  # the widest dtypes first, then the engines in their order
        ("fsdp2|mfsdp", None, "fsdp2-fp32"),
        ("ddp-bf16|mfsdp-optim-fp32", None, "mfsdp-optim-fp32"),
        ("", "mfsdp-optim-bf16", "mfsdp-optim-bf16"),
    ],
)
def test_the_reference_is_named_or_chosen_by_rule_wherever_it_stands(
    quickstart_root, among, named, expected
):
    store = ResultsStore.open(quickstart_root, create=False)
    cells = [c for c in load(store)[0].cells if re.match(among, c.name)]
    for order in (cells, cells[::-1]):
        assert choose_reference(order, named, usable).name == expected
    if not among:
        assert "in the order ddp, fsdp2, mfsdp, then the fewest" in rule_for(cells)
        assert "engines" not in rule_for(cells[:1])
        with pytest.raises(UsageError, match=r"'nope'.*ddp-fp32"):
            choose_reference(cells, "nope", usable)


def test_a_named_cell_without_a_number_is_refused(store):
    resolved = resolved_run()
    write_plan(store, [("only", resolved)])
    record_run(store, Recorded(resolved, cell="only", state="crashed"))
    cells = load(store)[0].cells
    with pytest.raises(UsageError, match="no finished"):
        choose_reference(cells, "only", usable)
    assert choose_reference(cells, None, usable) is None
