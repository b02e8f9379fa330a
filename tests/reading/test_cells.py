"""Which runs stand for a cell: newest code, one per repeat, good before failed, damage apart."""

from __future__ import annotations

import dataclasses

import pytest
from recorded_runs import Recorded, record_run, resolved_run

from bench.derive.metrics import LOSS, STEP_TIME
from bench.record import STOPPED
from reports.views.cells import Run, dtype_policy, make_cell

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


def test_the_newer_of_two_finished_runs_counts(store):
    made = records(store, Recorded(RUN, speed=5.0), Recorded(RUN, speed=1.0, seed=3))
    cell = make_cell("c", made)
    assert (cell.value(STEP_TIME) or 0) < 400


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


def test_a_run_that_drifts_finishes_without_a_time(store):
    made = records(store, Recorded(RUN, milliseconds=lambda step: 100 * 1.06**step))
    run = make_cell("c", made).runs[0]
    assert run.kind == "unsteady"
    assert run.finished


def test_a_running_run_is_neither_finished_nor_failed(store):
    resolved = resolved_run()
    with store.new_run(resolved, sweep="s", cell="c", repeat=0, arm=None, code="x"):
        (record,) = store.records()
        assert Run.of(record).kind == "running"


def test_a_policy_is_named_by_what_differs():
    assert dtype_policy(resolved_run()) == "fp32"
    assert dtype_policy(resolved_run(dtype="bf16", comm="bf16")) == "bf16, main fp32, comm bf16"
    assert dtype_policy(resolved_run(dtype="bf16")) == "bf16, main fp32"
