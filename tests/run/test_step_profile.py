"""`python -m tools.step_profile`: engines side by side, phase by phase."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.errors import UsageError
from bench.launch.git import git_state
from bench.resolve.resolution import resolve_anywhere
from bench.spec import EngineSpec, LaunchSpec, ModelSpec, RunSpec, TrainSpec
from tools.origin import origin
from tools.step_profile import METERS, PHASES, _spec, measure, table


def run(engine: EngineSpec, ranks: int = 2):
    return resolve_anywhere(
        RunSpec(
            model=ModelSpec(preset="debug"),
            engine=engine,
            train=TrainSpec(global_batch=4, micro_batch=1, seq_len=16),
            launch=LaunchSpec(ranks=ranks),
        )
    )


@pytest.mark.nightly
@pytest.mark.processes
def test_two_engines_are_measured_phase_by_phase_in_one_set_of_ranks():
    found = measure([run(EngineSpec(name="ddp")), run(EngineSpec(name="mfsdp"))], steps=2)
    assert [name.split(" ")[0] for name in found] == ["1", "2"]
    for engine in found.values():
        phases = engine["phases"]
        assert set(phases) == {*PHASES, "step"}
        assert all(set(meters) == set(METERS) for meters in phases.values())
        assert phases["step"]["wall_milliseconds"] >= phases["optimizer"]["wall_milliseconds"] > 0
        assert engine["operations_self_milliseconds"]["aten::mm"] > 0
    text = table(found)
    assert len(text.splitlines()) == 2 + len(PHASES)
    assert " 1.00" in text


def test_runs_on_different_numbers_of_ranks_are_refused():
    with pytest.raises(UsageError, match=r"found \[1, 2\] ranks"):
        measure([run(EngineSpec(name="ddp"), 1), run(EngineSpec(name="mfsdp"))], steps=1)


def test_a_folder_without_a_run_is_refused(tmp_path: Path):
    (tmp_path / "other.json").write_text(json.dumps({}))
    with pytest.raises(UsageError, match=r"found no spec.json"):
        _spec(tmp_path)


def test_what_is_measured_names_the_commit_of_this_repository():
    assert origin()["git"] == git_state(Path(__file__).parents[2])
