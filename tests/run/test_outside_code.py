"""An engine and a model of somebody else, through the public seam: run, recorded and validated."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest
from launched_runs import launched
from small_runs import LAPTOP

from bench.errors import ConfigError, UsageError
from bench.launch.code import code_identity
from bench.resolve import broken_rules, resolve
from bench.resolve.resolution import resolve_anywhere
from bench.spec import (
    EngineRow,
    EngineSettings,
    EngineSpec,
    LaunchSpec,
    ModelSpec,
    RunSpec,
    TrainSpec,
    engine_table,
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
    engine_table.forget_entry_points()
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


class Fancy(EngineSettings):
    """What an installed engine may ask for."""

    fancy: bool = False


@dataclasses.dataclass(frozen=True)
class Offered:
    """An entry point, as importlib.metadata gives it."""

    name: str
    value: str
    offers: object

    def load(self) -> object:
        if isinstance(self.offers, Exception):
            raise self.offers
        return self.offers


@pytest.fixture
def offer(monkeypatch: pytest.MonkeyPatch):
    """`offer(name, row)`: as if a package were installed that offers an engine."""

    def install(name: str, offers: object) -> None:
        point = Offered(name, f"{name}.bench:ROW", offers)
        monkeypatch.setattr(
            engine_table.metadata,
            "entry_points",
            lambda *, group: (point,) if group == engine_table.GROUP else (),
        )
        engine_table.forget_entry_points()

    yield install
    monkeypatch.undo()
    engine_table.forget_entry_points()


def test_an_installed_engine_has_settings_of_its_own(offer) -> None:
    offer("theirs", EngineRow("theirs", ENGINE, settings=Fancy, strategies=("no_shard",)))
    asked = EngineSpec.model_validate({"name": "theirs", "fancy": True})
    run = resolve(run_of("theirs").model_copy(update={"engine": asked}), LAPTOP)
    assert run.engine.setting("fancy") is True
    assert '"fancy":true' in run.canonical_json()
    plain = resolve(run_of("theirs"), LAPTOP)
    assert "fancy" not in plain.canonical_json()
    foreign = RunSpec(engine=EngineSpec.model_validate({"name": "ddp", "fancy": True}))
    reasons = dict(broken_rules(resolve_anywhere(foreign), LAPTOP))
    assert reasons["switch-not-in-engine"] == (
        "engine ddp has no fancy=True: these are switches of theirs"
    )


def test_a_record_stays_readable_when_its_engine_is_gone(offer) -> None:
    offer("theirs", EngineRow("theirs", ENGINE, settings=Fancy, strategies=("no_shard",)))
    asked = EngineSpec.model_validate({"name": "theirs", "fancy": True})
    run = resolve(run_of("theirs").model_copy(update={"engine": asked}), LAPTOP)
    text = run.model_dump_json()
    offer("other", EngineRow("other", ENGINE))
    again = type(run).model_validate_json(text)
    assert again.engine.model_dump() == run.engine.model_dump()
    assert again.config_hash == run.config_hash


@pytest.mark.parametrize(
    ("offers", "says"),
    [
        (ImportError("no such thing"), "cannot be loaded"),
        (42, "expected an EngineRow named 'theirs', found 42"),
        (EngineRow("mine", ENGINE), "found the row of 'mine'"),
    ],
)
def test_a_package_that_offers_no_row_is_named(offer, offers: object, says: str) -> None:
    offer("theirs", offers)
    with pytest.raises(ConfigError, match=says):
        resolve_anywhere(run_of("theirs"))


def test_an_engine_may_not_take_the_name_of_a_shared_setting() -> None:
    class Clashing(EngineSettings):
        strategy: bool = False

    with pytest.raises(ValueError, match="one that all engines share"):
        EngineRow("theirs", ENGINE, settings=Clashing)
