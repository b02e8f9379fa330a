"""Flags for what a bare speed would hide."""

from __future__ import annotations

import pytest
from recorded_runs import Recorded, record_run, resolved_run

from reports.comparisons.change import change_between
from reports.comparisons.parity import parity_groups
from reports.comparisons.tradeoffs import tradeoff_flags
from reports.views.cells import make_cell


def cell(store, name, strategy, speed, **changes):
    resolved = changes.pop("resolved", None) or resolved_run("ddp", strategy)
    record_run(store, Recorded(resolved, cell=name, sweep=name, speed=speed, **changes))
    return make_cell(name, store.records(sweep=name))


def flags_of(base, head):
    rows = {row.cell.name: row for group in parity_groups([base, head]) for row in group.rows}
    return [flag.text for flag in tradeoff_flags([change_between(base, head)], rows)]


@pytest.mark.parametrize(
    ("base", "head", "speed", "expected"),
    [
        ("optim_grads", "no_shard", 0.8, "faster, but more memory"),
        ("no_shard", "optim_grads", 1.3, "less memory, but slower"),
        ("optim_grads", "no_shard", 1.3, "slower and more memory"),
    ],
)
def test_speed_is_never_told_without_the_memory_it_cost(store, base, head, speed, expected):
    (text,) = flags_of(cell(store, "a", base, 1.0), cell(store, "b", head, speed))
    assert text.startswith(expected)
    assert "throughput" in text
    assert "ledger peak" in text
    assert "n=1, no interval" in text


def test_faster_with_less_memory_is_no_trade_off(store):
    assert flags_of(cell(store, "a", "no_shard", 1.0), cell(store, "b", "optim", 0.7)) == []


def test_changes_below_the_thresholds_are_no_trade_off(store):
    steady = {"milliseconds": lambda _: 100.0}
    near = {"milliseconds": lambda _: 99.0}
    base = cell(store, "a", "optim_grads", 1.0, **steady)
    assert flags_of(base, cell(store, "b", "no_shard", 1.0, **near)) == []


def test_a_loss_that_left_its_policys_bound_is_flagged(store):
    base = cell(store, "a", "no_shard", 1.0)
    (text,) = flags_of(base, cell(store, "b", "no_shard", 1.0, loss_shift=1e-3, seed=0))
    assert text.startswith("loss moved: differs from the same dtype policy's reference")


def test_across_policies_only_a_difference_beyond_the_coarser_rounding_is_flagged(store):
    base = cell(store, "a", "no_shard", 1.0)
    low = resolved_run("ddp", "no_shard", dtype="bf16", comm="bf16")
    near = cell(store, "b", "no_shard", 1.25, resolved=low)
    assert not any("loss moved" in text for text in flags_of(base, near))
    far = cell(store, "c", "no_shard", 1.25, resolved=low, loss_shift=0.02)
    assert any("coarser dtype policy's bound" in text for text in flags_of(base, far))
