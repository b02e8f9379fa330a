"""An engine and a model of somebody else, through the public seam: run, recorded and validated."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from launched_runs import launched
from small_runs import LAPTOP

from bench.errors import ConfigError, UsageError
from bench.launch.code import code_identity
from bench.resolve import resolve
from bench.resolve.resolution import resolve_anywhere
from bench.spec import (
    EngineSpec,
    LaunchSpec,
    ModelSpec,
    RunSpec,
    TrainSpec,
)
from bench.testing.workers import ForkServer
from bench.validate.session import check_that_they_load

HERE = Path(__file__).parent
ENGINE = "toy_engine:build"


@pytest.fixture(autouse=True)
def beside_the_toys(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a user stands beside his own files."""
    monkeypatch.chdir(HERE)


def run_of(engine: str, model: ModelSpec | None = None, steps: int = 8) -> RunSpec:
    return RunSpec(
        model=model or ModelSpec(),
        engine=EngineSpec(name=engine),
        train=TrainSpec(steps=steps, lr=3e-3),
        launch=LaunchSpec(ranks=2),
    )


@pytest.mark.processes
def test_an_engine_of_somebody_else_trains_a_model_of_theirs_as_ours_does(
    tmp_path: Path, run_cells, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = ModelSpec(factory="toy_model:build")
    monkeypatch.setenv("PYTHONPROFILEIMPORTTIME", "1")
    loads = iter([0.25])
    monkeypatch.setattr(os, "getloadavg", lambda: (next(loads, 9.0), 0.0, 0.0))
    theirs = launched(tmp_path / "a", resolve(run_of(ENGINE, model), LAPTOP))
    assert theirs.status.state in {"ok", "unstable"}, theirs.status.reason
    assert theirs.is_whole, theirs.damage
    monkeypatch.delenv("PYTHONPROFILEIMPORTTIME")
    ours = run_cells(tmp_path, {"ours": resolve(run_of("mfsdp", model), LAPTOP)})["ours"]
    assert theirs.losses == pytest.approx(ours.losses, rel=1e-5)
    assert ours.losses[-1] < ours.losses[0]
    assert theirs.status.code_proof == "proven"
    runtime = theirs.environment["runtime"]
    assert runtime["engine_code_path"] == str(HERE / "toy_engine.py")
    assert runtime["code_proof"]["0"]["packages"]["toy_engine"]["sha256"]
    assert theirs.run_id.startswith("toy_model.build-toy_engine.build-no_shard-fp32-2xcpu-")
    assert len(theirs.losses) == 8
    assert theirs.memory is not None
    assert theirs.environment["packages"]["torch"]
    assert theirs.environment["load_average_before"] == 0.25
    # What every rank needs of torch was loaded once, before they were forked.
    loaded = [
        {line.rpartition("|")[2].strip() for line in log.read_text().splitlines()}
        for log in sorted(tmp_path.glob("a/results/runs/*/*/logs/*.log"))
    ]
    of_torch = {"torch", "torch._dynamo", "torch.distributed.tensor", "torch.distributed.fsdp"}
    found = [modules & (of_torch | {"bench.meters.memory_profile"}) for modules in loaded]
    assert found == [of_torch, *[{"bench.meters.memory_profile"}] * 2]


@pytest.mark.processes
@pytest.mark.parametrize(
    ("engine", "says"),
    [("toy_model:WIDTH", "found 12"), ("asyncio.windows_utils:pipe", "ImportError: win32 only")],
)
def test_an_engine_that_raises_when_imported_is_refused_once(
    fork_server: ForkServer, engine: str, says: str
) -> None:
    check_that_they_load(fork_server, ("ddp", ENGINE))
    with pytest.raises(UsageError, match=f"{engine} cannot be loaded: .*{says}"):
        check_that_they_load(fork_server, (engine,))


def test_its_code_names_its_runs_and_no_others(tmp_path: Path, monkeypatch) -> None:
    for name in ("toy_engine.py", "toy_model.py"):
        (tmp_path / name).write_text((HERE / name).read_text())
    monkeypatch.chdir(tmp_path)
    specs = (run_of(ENGINE), run_of("ddp"))
    before = [code_identity(resolve(spec, LAPTOP)) for spec in specs]
    (tmp_path / "toy_engine.py").write_text((HERE / "toy_engine.py").read_text() + "\nX = 1\n")
    after = [code_identity(resolve(spec, LAPTOP)) for spec in specs]
    assert before[0] != after[0]
    assert before[1] == after[1]


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"factory": "toy_model"}, "model.factory: expected package.module:function"),
        ({"factory": "toy_model:build", "layers": 3}, "leave layers out"),
        ({"factory": "toy_model:build", "preset": "tiny"}, "factory and preset each name a model"),
    ],
)
def test_a_factory_excludes_what_it_decides(fields: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        resolve_anywhere(RunSpec(model=ModelSpec.model_validate(fields)))
