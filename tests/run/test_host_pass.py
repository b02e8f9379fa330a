"""What an engine costs the host per unit: present for every engine, moved by slower code.

Times are judged by nobody here; what repeats is the number of calls.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.derive.host_time import HostPass, calls_per_unit, microseconds_per_unit
from bench.derive.metrics import HOST_CALLS, HOST_TIME
from bench.derive.summary import summarise
from bench.resolve.machine import Machine
from bench.resolve.resolution import resolve_anywhere
from bench.resolve.rules import RULES
from bench.spec import EngineSpec, LaunchSpec, MeasureSpec, ModelSpec, RunSpec, TrainSpec
from bench.spec.engine_table import TABLE
from bench.store.reading import read_record
from bench.validate.patched_core import copy_of_core

SLOW_DOWNS = Path(__file__).parent / "slow_downs"


def cell(engine: str, **settings: object):
    ranks = 1 if engine == "single" else 2
    row = next(row for row in TABLE if row.name == engine)
    spec = RunSpec(
        model=ModelSpec(preset="debug"),
        engine=EngineSpec.model_validate(
            {"name": engine, "strategy": row.strategies[-1], **settings}
        ),
        train=TrainSpec(steps=2, global_batch=2, micro_batch=1, seq_len=16),
        launch=LaunchSpec(ranks=ranks),
        measure=MeasureSpec(host_time=True),
    )
    return resolve_anywhere(spec)


def engines_here() -> list[str]:
    """Those that train on the CPU ranks of this machine."""
    machine = Machine.detect()
    cells = {row.name: cell(row.name) for row in TABLE if row.trains}
    return [
        name for name, run in cells.items() if not any(rule.check(run, machine) for rule in RULES)
    ]


@pytest.fixture(scope="module")
def passes(run_cells, tmp_path_factory):
    names = engines_here()
    runs = {name: cell(name) for name in names if name != "single"} | {"again": cell("mfsdp")}
    found = run_cells(tmp_path_factory.mktemp("host"), runs)
    return found | run_cells(tmp_path_factory.mktemp("alone"), {"single": cell("single")})


def host(finished) -> HostPass:
    return HostPass.model_validate(finished.document("host.json"))


def test_every_engine_of_this_machine_is_measured_on_every_rank(passes):
    assert {"single", "ddp", "fsdp1", "fsdp2", "mfsdp"} <= passes.keys()
    for name, finished in passes.items():
        found = host(finished)
        assert (found.units, found.reason) == (8, ""), name
        assert len(found.microseconds) == len(found.calls) == finished.ranks, name
        assert {len(one) for one in (*found.microseconds, *found.model_microseconds)} == {20}, name
        assert all(calls > 0 for calls in found.calls), name


def test_two_launches_call_as_often_to_the_digit(passes):
    assert host(passes["mfsdp"]).calls == host(passes["again"]).calls


def test_the_timed_steps_know_nothing_of_it(passes):
    assert [sample.step for sample in passes["mfsdp"].samples()] == [1, 2]


@pytest.mark.parametrize("slow_down", ["a-loop-over-parameters", "a-sleep"])
def test_slower_code_of_a_unit_is_seen_in_its_calls(passes, run_cells, tmp_path, slow_down):
    copy_of_core(tmp_path, SLOW_DOWNS / f"{slow_down}.patch")
    root = tmp_path / "runs"
    root.mkdir()
    slow = host(run_cells(root, {"mfsdp": cell("mfsdp")}, core=tmp_path)["mfsdp"])
    assert calls_per_unit(slow) >= calls_per_unit(host(passes["mfsdp"])) + 1


def test_the_least_of_the_model_alone_is_subtracted_and_ranks_are_averaged():
    found = HostPass(
        units=2,
        microseconds=((10.0, 14.0, 90.0), (20.0, 20.0, 20.0)),
        model_microseconds=((4.0, 4.0, 4.0), (10.0, 10.0, 70.0)),
        calls=(6, 10),
    )
    assert microseconds_per_unit(found) == ((10 - 4) / 2 + (20 - 10) / 2) / 2
    assert calls_per_unit(found) == 4


def test_a_record_has_both_metrics_and_one_without_the_passes_has_none(passes, tmp_path):
    record = read_record(passes["mfsdp"].folder, "run")
    summary = summarise(record)
    assert HOST_TIME.of(record, summary) is not None
    assert HOST_CALLS.of(record, summary) == calls_per_unit(host(passes["mfsdp"]))
    (passes["again"].folder / "host.json").unlink()
    without = read_record(passes["again"].folder, "run")
    assert HOST_TIME.of(without, summarise(without)) is None
