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


def test_repeats_of_a_cell_are_its_replicates(store):
    cell = make_cell("c", records(store, *(Recorded(RUN, repeat=i) for i in range(3))))
    assert cell.n == 3
    assert cell.superseded == 0


def test_the_cells_number_is_the_median_over_its_runs(store):
    made = records(store, *(Recorded(RUN, repeat=i, speed=1.0 + i) for i in range(3)))
    cell = make_cell("c", made)
    times = sorted(cell.values(STEP_TIME))
    assert cell.value(STEP_TIME) == times[1]


def test_runs_of_older_code_are_left_out_and_counted(store):
    made = records(store, Recorded(RUN, code="old", speed=9.0), Recorded(RUN, code="new"))
    cell = make_cell("c", made)
    assert cell.n == 1
    assert cell.superseded == 1
    assert cell.runs[0].record.status.code == "new"


def test_a_retried_failure_gives_way_to_the_run_that_finished(store):
    made = records(store, Recorded(RUN, state="crashed", reason="x"), Recorded(RUN))
    assert make_cell("c", made).n == 1


def test_a_finished_run_is_not_lost_to_a_later_interrupted_one(store):
    made = records(store, Recorded(RUN), Recorded(RUN, state="interrupted", steps=3))
    cell = make_cell("c", made)
    assert cell.n == 1
    assert cell.superseded == 1


def test_the_newer_of_two_finished_runs_counts(store):
    made = records(store, Recorded(RUN, speed=5.0), Recorded(RUN, speed=1.0, seed=3))
    cell = make_cell("c", made)
    assert (cell.value(STEP_TIME) or 0) < 400


def test_a_truncated_sample_file_makes_the_run_damaged_and_uncounted(store):
    folder = record_run(store, Recorded(RUN))
    path = folder.path / "steps.node0.jsonl"
    path.write_text(path.read_text()[:-100])
    cell = make_cell("c", store.records())
    assert cell.runs[0].kind == "damaged"
    assert cell.n == 0
    assert cell.value(LOSS) is None


def test_a_crashed_run_with_a_cut_last_line_is_failed_not_damaged(store):
    folder = record_run(store, Recorded(RUN, state="crashed", reason="killed", steps=5))
    path = folder.path / "steps.node0.jsonl"
    path.write_text(path.read_text()[:-20])
    assert make_cell("c", store.records()).runs[0].kind == "failed"


@pytest.mark.parametrize("state", sorted(STOPPED))
def test_a_run_that_was_ended_from_outside_has_not_failed(store, state):
    record_run(store, Recorded(RUN, state=state, reason="by the user", steps=5))
    assert make_cell("c", store.records()).runs[0].kind == "stopped"


def test_a_damaged_status_is_damage(store):
    folder = record_run(store, Recorded(RUN))
    (folder.path / "status.json").write_text("{")
    assert make_cell("c", store.records()).runs[0].kind == "damaged"


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
