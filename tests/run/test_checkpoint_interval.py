"""`train.checkpoint_every`: what saving took. `test_engine_runs` has runs that save."""

from __future__ import annotations

import pytest

from bench.derive.checkpoints import checkpoint_cost
from bench.record import RunRecord, RunStatus
from bench.resolve.resolution import resolve_anywhere
from bench.spec import RunSpec, TrainSpec


def record_with(checkpoints: dict | None) -> RunRecord:
    resolved = resolve_anywhere(RunSpec(train=TrainSpec(checkpoint_every=2)))
    return RunRecord("r", resolved, RunStatus(), {}, {}, checkpoints=checkpoints)


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
