"""What changed between two cells: three numbers of speed, memory, bytes, loss; how many runs."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from recorded_runs import Recorded, record_run, resolved_run

from bench.derive.metrics import LEDGER_PEAK, RSS
from bench.derive.summary import summarise
from reports.comparisons.change import change_between, memory_metric
from reports.views.cells import Cell, Run, make_cell


def cell(store, name, *, runs=1, **changes):
    for repeat in range(runs):
        resolved = changes.get("resolved", resolved_run("ddp", "no_shard"))
        rest = {key: value for key, value in changes.items() if key != "resolved"}
        record_run(store, Recorded(resolved, cell=name, sweep=name, repeat=repeat, **rest))
    return make_cell(name, store.records(sweep=name))


def test_half_the_time_is_double_the_throughput_by_all_three_names(store):
    base = cell(store, "a", milliseconds=lambda _: 200.0)
    head = cell(store, "b", milliseconds=lambda _: 100.0)
    change = change_between(base, head)
    assert change.time_change == pytest.approx(-0.5)
    assert change.throughput_change == pytest.approx(1.0)
    assert change.throughput_ratio == pytest.approx(2.0)


def test_the_published_22_5_percent_of_time_are_29_percent_of_throughput(store):
    base = cell(store, "a", milliseconds=lambda _: 3300.5)
    head = cell(store, "b", milliseconds=lambda _: 2559.1)
    change = change_between(base, head)
    assert change.time_change == pytest.approx(-0.2246, abs=1e-4)
    assert change.throughput_change == pytest.approx(0.2897, abs=1e-4)


@given(st.floats(1, 1e4), st.floats(1, 1e4))
def test_time_and_throughput_tell_one_story_for_equal_batches(before, after):
    base, head = fake_cell("a", before), fake_cell("b", after)
    change = change_between(base, head)
    assert change.time_change is not None
    assert change.throughput_ratio is not None
    assert (1 + change.time_change) * change.throughput_ratio == pytest.approx(1.0)
    assert change.throughput_change == pytest.approx(change.throughput_ratio - 1)


def fake_cell(name, milliseconds):
    """A cell in memory, without a file."""
    from bench.record import RunRecord, RunStatus, StepSample

    steps = [StepSample(i, milliseconds, 3.0, 1.0, 1e-3, 512, 10, 10) for i in range(1, 21)]
    record = RunRecord(name, resolved_run(ranks=1), RunStatus(state="ok"), {}, {0: steps})
    return Cell(name, (Run(record, summarise(record)),))


@pytest.mark.parametrize(
    ("base", "head", "note"),
    [
        (1, 1, "n=1, no interval"),
        (1, 3, "n=3 against 1, no interval"),
        (3, 3, "n=3 against 3, no verdict"),
    ],
)
def test_the_number_of_runs_is_said_with_what_follows_from_it(store, base, head, note):
    change = change_between(cell(store, "a", runs=base), cell(store, "b", runs=head))
    assert change.sample_note == note


def test_an_unsteady_side_has_no_time_but_memory_and_loss(store):
    base = cell(store, "a")
    head = cell(store, "b", milliseconds=lambda step: 100 * 1.07**step)
    change = change_between(base, head)
    assert change.time_change is None
    assert change.throughput_ratio is None
    assert change.memory_change == 0.0
    assert change.loss_difference == 0.0
    assert change.sample_note == "no time to compare"


def test_memory_is_compared_by_the_most_telling_number_both_sides_have(store):
    base, head = cell(store, "a"), cell(store, "b")
    assert memory_metric([base, head]) is LEDGER_PEAK
    for path in (store.root / "runs").glob("*/*/memory.json"):
        path.unlink()
    without = make_cell("a", store.records(sweep="a"))
    assert memory_metric([without, head]) is RSS


def test_a_loss_difference_is_relative_to_the_base_and_signed(store):
    change = change_between(cell(store, "a"), cell(store, "b", loss_shift=-0.01))
    assert change.loss_difference == pytest.approx(-0.01, rel=0.01)
