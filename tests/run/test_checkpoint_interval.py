"""`train.checkpoint_every`: what saving took. `test_engine_runs` has runs that save."""

from __future__ import annotations

import pytest

from bench.derive.checkpoints import checkpoint_cost
from bench.record import RunRecord, RunStatus
from bench.resolve.resolution import resolve_anywhere
from bench.spec import ResolvedRun, RunSpec, TrainSpec


def saving(every: int | None) -> ResolvedRun:
    return resolve_anywhere(RunSpec(train=TrainSpec(checkpoint_every=every)))


def test_a_run_that_saves_nothing_keeps_its_name():
    plain, every = saving(None), saving(3)
    assert "checkpoint_every" not in plain.canonical_json()
    assert plain.config_hash != every.config_hash


def record_with(checkpoints: dict | None) -> RunRecord:
    return RunRecord("r", saving(2), RunStatus(), {}, {}, checkpoints=checkpoints)


def test_the_cost_is_the_median_and_the_largest_size():
    saves = [{"step": s, "milliseconds": float(s), "bytes": 100 - s} for s in (1, 2, 9)]
    cost = checkpoint_cost(record_with({"every_steps": 1, "saves": saves}))
    assert cost is not None
    assert (cost.median_milliseconds, cost.largest_bytes) == (2.0, 99)


@pytest.mark.parametrize(
    "damaged", [None, {}, {"every_steps": 0}, {"every_steps": 1, "saves": [{"step": "x"}]}]
)
def test_a_damaged_account_is_none_rather_than_an_error(damaged):
    assert checkpoint_cost(record_with(damaged)) is None
