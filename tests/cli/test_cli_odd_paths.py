"""Paths and streams that cannot be used end with a message, not with an internal error."""

from __future__ import annotations

import json
import os
import shutil

import pytest
from outcome_scenarios import ONE
from recorded_runs import Arm, record_arms

from bench.errors import UsageError

LONG = "a" * 300
USAGE = 2
NOTHING_MEASURED = 3


@pytest.mark.parametrize(
    "arguments",
    [
        ["plan", LONG],
        ["report", LONG],
        ["report", "--out", LONG],
        ["run", "quickstart", "--results", "/proc/no_such_folder"],
        ["plan", "quickstart", "--set", "launch.hang_seconds=1e308"],
    ],
)
def test_a_path_or_limit_that_cannot_be_used_is_a_usage_error(arguments, world):
    assert world.store.sweeps() == []
    assert world.run(*arguments) == USAGE, world.err
    assert "Traceback" not in world.err


def test_a_closed_standard_output_is_no_internal_error(cli):
    ended = cli.run("schema", preexec_fn=lambda: os.close(1))
    assert ended.returncode == 0, ended.stderr


def test_a_results_folder_that_is_a_dangling_link_is_refused_and_named(in_process, tmp_path):
    link = tmp_path / "results"
    link.symlink_to(tmp_path / "unmounted")
    for verb in (["run", "quickstart"], ["status"], ["report", "quickstart"]):
        code, _, printed = in_process(*verb, "--results", link)
        assert code == USAGE
        assert f"{link} is a link to {tmp_path / 'unmounted'}, which does not exist" in printed
    assert not (tmp_path / "unmounted").exists()


def test_a_lost_plan_is_said_to_be_lost_and_running_again_brings_it_back(world):
    assert world.sweep() == 0
    (world.folder / "results" / "sweeps" / "two" / "plan.json").unlink()
    assert world.run("status") == 0
    assert "warning: 2 runs of sweep two, whose plan is lost" in world.err
    assert world.run("status", "two") == USAGE
    assert "the plan of sweep 'two' is lost" in world.err
    assert "(2 in " in world.err
    assert world.sweep() == 0
    assert "(0 now, 2 before)" in world.err
    assert world.run("status", "two") == 0


@pytest.mark.parametrize("left", [None, '{"arms": ['])
def test_arms_whose_plan_is_lost_are_not_compared_with_the_wrong_sign(world, left):
    record_arms(world.store, {"late": Arm(slower=1.5), "early": Arm()}, cells=ONE, blocks=1)
    plan = world.folder / "results" / "sweeps" / "gate" / "plan.json"
    plan.unlink() if left is None else plan.write_text(left)
    for verb in ("gate", "compare"):
        assert world.run(verb, "gate") == USAGE
        assert "lost" in world.err
        assert "run the sweep again, which writes a new plan" in world.err
    assert world.run("report", "gate") == 0
    page = (world.folder / "results" / "reports" / "gate" / "report.html").read_text()
    assert "late, which ran first, is taken for it, and changes may have the wrong sign" in page


def test_dots_as_a_name_are_refused_and_nothing_is_written_outside(world):
    assert world.sweep() == 0
    before = sorted(path.name for path in world.folder.iterdir())
    for words in (
        "status ..",
        "status .. --logs",
        "report ..",
        "compare .. ..",
        "run ..",
        "plan .",
        "gate two --baseline ..",
        "baseline save .. two",
        "baseline noise ..",
    ):
        assert world.run(*words.split()) == USAGE, words
        assert "internal error" not in world.err
        assert sorted(path.name for path in world.folder.iterdir()) == before


@pytest.mark.parametrize("removed", ["runs/*/*", ""], ids=["the run", "all results"])
def test_a_folder_removed_during_a_run_ends_it_with_a_sentence(world, monkeypatch, removed):
    def launch(resolved, folder, **_: object):
        for path in list((world.folder / "results").glob(removed or "../results")):
            shutil.rmtree(path)
        return world.finish(resolved, folder, "ok")

    monkeypatch.setattr("sweeps.selected_sweep.launch", launch)
    assert world.sweep() == NOTHING_MEASURED
    assert "its folder is gone; somebody removed or renamed it while it was in use" in world.err


@pytest.mark.parametrize(
    ("problem", "code", "says"),
    [
        (UsageError("the folder cannot be written"), USAGE, "the folder cannot be written"),
        (ZeroDivisionError("a figure"), 6, "internal error: ZeroDivisionError: a figure"),
    ],
)
def test_a_report_that_fails_loses_nothing_of_what_was_run(world, monkeypatch, problem, code, says):
    def fail(*_: object, **__: object) -> None:
        raise problem

    monkeypatch.setattr("reports.build.write_report", fail)
    file = world.file("name: two\nmatrix: {product: {engine.name: [ddp, mfsdp]}}\n")
    world.states = {"ddp": "crashed"}
    assert world.run("run", file, "--report") == code
    assert "mfsdp" in world.out
    assert "ddp (repeat 0): crashed: as the test wants" in world.err
    hint, last = world.err.splitlines()[-2:]
    assert hint == "report: mfsdp-bench report two"
    assert last.startswith(f"error: {says}")
    assert world.run("run", file, "--report", "--json") == code
    told = json.loads(world.out)
    assert (told["exit_code"], told["error"], told["report"]) == (code, str(problem), None)
    assert [run["state"] for run in told["done_before"]] == ["ok"]
