"""A sweep as it was planned against what the store holds."""

from __future__ import annotations

import pytest
from recorded_runs import Recorded, record_run, resolved_run, write_plan

from bench.errors import UsageError
from bench.spec import DataSpec, ResolvedRun
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


def test_pruned_and_merged_cells_keep_their_reasons(store):
    write_plan(
        store,
        [("first", A)],
        pruned=[{"id": "p", "labels": {}, "rule": "too_few_devices", "reason": "needs 8"}],
        duplicates=[{"id": "d", "labels": {}, "same_as": "first", "reason": "same"}],
    )
    view = load(store)[0]
    assert [(c.name, c.rule, c.reason) for c in view.pruned] == [
        ("p", "too_few_devices", "needs 8")
    ]
    assert view.merged == (("d", "first"),)


def test_runs_are_matched_by_configuration_and_others_counted(store):
    write_plan(store, [("new-name", A)])
    record_run(store, Recorded(A, cell="old-name"))
    record_run(store, Recorded(B, cell="gone"))
    view = load(store)[0]
    assert ([cell.name for cell in view.cells], view.stale) == (["new-name"], 1)


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


def test_arms_of_one_cell_are_cells_of_their_own(store):
    write_plan(store, [("first", A)])
    for arm in ("base", "head"):
        record_run(store, Recorded(A, cell="first", arm=arm, code=arm))
    assert [cell.name for cell in load(store)[0].cells] == ["first [base]", "first [head]"]


def test_a_run_whose_status_is_lost_is_found_again_by_its_configuration(store):
    write_plan(store, [("first", A)])
    folder = record_run(store, Recorded(A, cell="first"))
    (folder.path / "status.json").unlink()
    (cell,) = load(store)[0].cells
    assert cell.name == "first"
    assert cell.runs[0].kind == "damaged"


def test_several_sweeps_put_their_id_before_cell_names(store):
    for sweep in ("one", "two"):
        write_plan(store, [("first", A)], sweep=sweep)
        record_run(store, Recorded(A, cell="first", sweep=sweep))
    names = [cell.name for view in load(store, "one", "two") for cell in view.cells]
    assert names == ["one: first", "two: first"]


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


def test_a_run_folder_without_a_readable_spec_is_listed_as_damaged(store):
    write_plan(store, [("first", A)])
    folder = record_run(store, Recorded(A, cell="first"))
    (folder.path / "spec.json").write_text("not json")
    view = load(store)[0]
    assert view.cells == ()
    assert any(folder.run_id in text for text in view.problems)


def test_an_unknown_sweep_is_refused_with_the_known_ones(store):
    write_plan(store, [("first", A)])
    with pytest.raises(UsageError, match="known sweeps: quickstart"):
        load(store, "quickstrat")


def test_no_sweep_at_all_is_refused(store):
    with pytest.raises(UsageError, match="no sweep named"):
        load_sweeps(store, [])
