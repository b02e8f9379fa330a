"""`train.checkpoint_every`: runs that save on their way, and what it took."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.derive.checkpoints import checkpoint_cost
from bench.record import RunRecord, RunStatus
from bench.resolve import resolve
from bench.resolve.machine import Machine
from bench.spec import EngineSpec, LaunchSpec, ModelSpec, ResolvedRun, RunSpec, TrainSpec

LAPTOP = Machine(cpu_count=2, memory_bytes=16 * 2**30)
ENGINES = ("single", "ddp", "fsdp2", "mfsdp")


def saving(engine: str, every: int | None) -> ResolvedRun:
    spec = RunSpec(
        model=ModelSpec(preset="debug", layers=1),
        engine=EngineSpec(name=engine),  # type: ignore[arg-type]
        train=TrainSpec(steps=5, global_batch=4, micro_batch=2, seq_len=16, checkpoint_every=every),
        launch=LaunchSpec(ranks=1 if engine == "single" else 2),
    )
    return resolve(spec, LAPTOP)


@pytest.mark.processes
def test_every_engine_saves_after_every_second_step_and_keeps_the_account(run_cells, tmp_path):
    shared = {engine: saving(engine, 2) for engine in ENGINES if engine != "single"}
    cells = run_cells(tmp_path, shared)
    cells |= run_cells(tmp_path, {"single": saving("single", 2)})
    for engine, cell in cells.items():
        assert not cell.failures, engine
        account = cell.document("checkpoints.json")
        assert account["every_steps"] == 2
        assert [save["step"] for save in account["saves"]] == [2, 4]
        # AdamW in FP32: a weight and two moments of four bytes per parameter, once over all ranks.
        state_bytes = 12 * saving(engine, 2).shape.parameters
        for save in account["saves"]:
            assert save["milliseconds"] > 0
            assert state_bytes <= save["bytes"] <= 1.2 * state_bytes
        assert not (Path(cell.folder) / "checkpoint").exists()


def test_a_run_that_saves_nothing_keeps_its_name():
    plain, every = saving("mfsdp", None), saving("mfsdp", 3)
    assert "checkpoint_every" not in plain.canonical_json()
    assert plain.config_hash != every.config_hash


def record_with(checkpoints: dict | None) -> RunRecord:
    return RunRecord("r", saving("mfsdp", 2), RunStatus(), {}, {}, checkpoints=checkpoints)


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
