"""What changed between two cells, in three numbers of speed, memory and loss; what it cost."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from recorded_runs import in_memory, recorded_cell, resolved_run, sample

from bench.derive.metrics import LEDGER_PEAK, RSS
from reports.comparisons.change import change_between, memory_metric, tradeoff_flags
from reports.comparisons.parity import parity_groups
from reports.views.cells import Cell, Run, make_cell

DDP = resolved_run("ddp", "no_shard")
LOW = resolved_run("ddp", "no_shard", dtype="bf16", comm="bf16")


@pytest.mark.parametrize(
    ("before", "after", "time", "throughput"),
    [
        (200.0, 100.0, -0.5, 1.0),
        (3300.5, 2559.1, -0.2246, 0.2897),  # published as 22.5 %: of time
    ],
)
def test_half_the_time_is_double_the_throughput_by_all_three_names(
    store, before, after, time, throughput
):
    base = recorded_cell(store, "a", DDP, milliseconds=lambda _: before)
    head = recorded_cell(store, "b", DDP, milliseconds=lambda _: after)
    change = change_between(base, head)
    assert change.time_change == pytest.approx(time, abs=1e-4)
    assert change.throughput_change == pytest.approx(throughput, abs=1e-4)
    assert change.throughput_ratio == pytest.approx(before / after)


@given(st.floats(1, 1e4), st.floats(1, 1e4))
def test_time_and_throughput_tell_one_story_for_equal_batches(before, after):
    def cell(milliseconds):
        steps = {0: [sample(i, milliseconds, tokens=512) for i in range(1, 21)]}
        return Cell("c", (Run.of(in_memory(steps, resolved=resolved_run(ranks=1))),))

    change = change_between(cell(before), cell(after))
    assert (1 + change.time_change) * change.throughput_ratio == pytest.approx(1.0)
    assert change.throughput_change == pytest.approx(change.throughput_ratio - 1)


@pytest.mark.parametrize(
    ("base", "head", "note"),
    [
        (1, 1, "n=1, no interval"),
        (1, 3, "n=3 against 1, no interval"),
        (3, 3, "n=3 against 3, no verdict"),
    ],
)
def test_the_number_of_runs_is_said_with_what_follows_from_it(store, base, head, note):
    one, other = (recorded_cell(store, n, DDP, runs=r) for n, r in (("a", base), ("b", head)))
    assert change_between(one, other).sample_note == note


def test_an_unsteady_side_has_no_time_but_memory_and_loss(store):
    base = recorded_cell(store, "a", DDP)
    head = recorded_cell(store, "b", DDP, milliseconds=lambda step: 100 * 1.07**step)
    change = change_between(base, head)
    assert (change.time_change, change.throughput_ratio) == (None, None)
    assert (change.memory_change, change.loss_difference) == (0.0, 0.0)
    assert change.sample_note == "no time to compare"


def test_memory_is_compared_by_the_most_telling_number_both_sides_have(store):
    base, head = (recorded_cell(store, name, DDP) for name in "ab")
    assert memory_metric([base, head]) is LEDGER_PEAK
    for path in (store.root / "runs").glob("*/*/memory.json"):
        path.unlink()
    without = make_cell("a", store.records(sweep="a"))
    assert memory_metric([without, head]) is RSS


def test_a_loss_difference_is_relative_to_the_base_and_signed(store):
    base = recorded_cell(store, "a", DDP)
    change = change_between(base, recorded_cell(store, "b", DDP, loss_shift=-0.01))
    assert change.loss_difference == pytest.approx(-0.01, rel=0.01)


def flags(store, base, head, **changes):
    """Of two cells, each a strategy and a speed; `changes` of the second."""
    resolved = changes.pop("resolved", None) or resolved_run("ddp", head[0])
    cells = [
        recorded_cell(store, "a", resolved_run("ddp", base[0]), speed=base[1]),
        recorded_cell(store, "b", resolved, speed=head[1], **changes),
    ]
    rows = {row.cell.name: row for group in parity_groups(cells) for row in group.rows}
    return [flag.text for flag in tradeoff_flags([change_between(*cells)], rows)]


@pytest.mark.parametrize(
    ("base", "head", "speed", "expected"),
    [
        ("optim_grads", "no_shard", 0.8, "faster, but more memory"),
        ("no_shard", "optim_grads", 1.3, "less memory, but slower"),
        ("optim_grads", "no_shard", 1.3, "slower and more memory"),
    ],
)
def test_speed_is_never_told_without_the_memory_it_cost(store, base, head, speed, expected):
    (text,) = flags(store, (base, 1.0), (head, speed))
    assert text.startswith(expected)
    for words in ("throughput", "ledger peak", "n=1, no interval"):
        assert words in text


def test_faster_with_less_memory_and_changes_below_the_thresholds_are_no_trade_off(store):
    assert flags(store, ("no_shard", 1.0), ("optim", 0.7)) == []
    cells = [
        recorded_cell(
            store, strategy, resolved_run("ddp", strategy), milliseconds=lambda _, t=time: t
        )
        for strategy, time in (("optim_grads", 100.0), ("no_shard", 99.0))
    ]
    assert tradeoff_flags([change_between(*cells)]) == []


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"loss_shift": 1e-3},
            "loss moved: differs from the same dtype policy's reference",
        ),
        # Of two policies, the coarser one's rounding is the yardstick.
        ({"resolved": LOW}, ""),
        ({"resolved": LOW, "loss_shift": 0.02}, "coarser dtype policy's bound"),
    ],
)
def test_a_loss_that_left_its_policys_bound_is_flagged(store, changes, said):
    speed = 1.25 if "resolved" in changes else 1.0  # as slow as FP32 is, whatever the dtype
    found = [
        text
        for text in flags(store, ("no_shard", 1.0), ("no_shard", speed), **changes)
        if "loss moved" in text
    ]
    assert [said in text for text in found] == ([True] if said else [])
