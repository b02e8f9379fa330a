"""Outcomes of `gate` and `compare` where what was measured is not what is asked for."""

from __future__ import annotations

import contextlib
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from outcome_scenarios import TWO_CELLS, World, scenario
from recorded_runs import CELLS, Arm, record_arms

from bench.cli import chosen_sweep
from bench.launch.code import RankCode

ROOT = Path(__file__).parents[2]
SAME = ("--arm", "base=.", "--arm", "head=.")
ONE_CELL = "name: one\nbase: {engine.name: ddp}\n"
BY_SETTINGS = "arms:\n  a: {set: {train.lr: 0.01}}\n  b: {set: {train.lr: 0.02}}\n"
BLOCKS = ("--interleave", "--repeat", "1")


@contextlib.contextmanager
def other_head() -> Iterator[None]:
    """The code of the arm head is other code; "a head that was edited" has a copy in truth."""
    real = chosen_sweep.code_identity

    def identity(*asked: Any, code: RankCode | None = None) -> str:
        is_head = code is not None and code.arm == "head"
        return "0123456789abcdef" if is_head else real(*asked, code=code)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chosen_sweep, "code_identity", identity)
        yield


def codes(text: str) -> set[str]:
    return set(re.findall(r"\(code ([0-9a-f]{16})\)", text))


def edited(monkeypatch: pytest.MonkeyPatch, code: str = "0123456789abcdef") -> None:
    """From here on the working tree is other code."""

    def identity(*_: Any, **__: Any) -> str:
        return code

    monkeypatch.setattr("bench.cli.chosen_sweep.code_identity", identity)


def measured_twice(world: World) -> None:
    """A/A of this checkout, measured."""
    assert world.run("run", world.file(ONE_CELL), *SAME, *BLOCKS) == 0


@scenario("gate", "an arm whose ref is unknown")
@scenario("compare", "an arm whose ref is unknown")
def _(world: World) -> int:
    measured_twice(world)
    wrong = ("--arm", "base=.", "--arm", "head=no_such_ref")
    code = world.run("gate", "sweep.yaml", *wrong)
    assert "git knows no commit 'no_such_ref'" in world.err
    assert world.run("compare", "sweep.yaml", *wrong) == code
    return code


@scenario("gate", "an arm that was measured with other code")
@scenario("compare", "an arm that was measured with other code")
def _(world: World) -> int:
    measured_twice(world)
    with other_head():
        code = world.run("gate", "sweep.yaml", *SAME)
        assert len(codes(world.err)) == 2
        assert re.search(r"one-base-vs-head-[0-9a-f]{8} measured head at commit", world.err)
        assert world.out == ""
        assert world.run("compare", "sweep.yaml", *SAME) == code
    return code


@scenario("gate", "a file whose arms were never measured")
@scenario("compare", "a file whose arms were never measured")
def _(world: World) -> int:
    measured_twice(world)
    renamed = ("--arm", "base=.", "--arm", "other=.")
    code = world.run("gate", "sweep.yaml", *renamed)
    assert "was never measured with base and other" in world.err
    assert world.run("compare", "sweep.yaml", *renamed) == code
    assert world.run("gate", world.file(ONE_CELL.replace("one", "new")), *SAME) == code
    return code


@scenario("gate", "two comparisons whose arms have the same names")
@scenario("compare", "two comparisons whose arms have the same names")
def _(world: World) -> int:
    measured_twice(world)
    with other_head():
        assert world.run("run", "sweep.yaml", *SAME, *BLOCKS) == 0
    both = world.store.sweeps()
    assert len(both) == 2
    assert all(world.store.read_plan(name)["id"] == name for name in both)
    assert world.run("status", "one-base-vs-head") == 0
    assert all(name in world.out for name in both)
    assert world.run("gate", "one-base-vs-head") == 2
    assert "2 sweeps are called one-base-vs-head" in world.err
    # Each gate judges its own, and running the first again repeats nothing.
    judged = []
    for measured in (contextlib.nullcontext, other_head):
        with measured():
            code = world.run("gate", "sweep.yaml", *SAME)
            assert code == world.run("compare", "sweep.yaml", *SAME) == 0
            assert world.run("run", "sweep.yaml", *SAME, *BLOCKS) == 0
            assert "2 of 2 runs finished (0 now, 2 before)" in world.err
            judged.append(world.out)
    assert len(list(world.store.records())) == 4
    return code


@scenario("gate", "an old sweep whose id has no code hash")
def _(world: World) -> int:
    from bench.cli import running
    from bench.cli.chosen_sweep import choose
    from bench.cli.options import SweepRequest
    from bench.cli.verbs.measure import RunRequest

    asked = SweepRequest(
        sweep=world.file(ONE_CELL), repeat=1, arms=("base=.", "head=."), interleave=True
    )
    before = replace(choose(asked), named_by_code=False)
    request = RunRequest(wanted=asked, results=world.folder / "results")
    assert running.run_and_tell(before, world.store, request).code == 0
    assert world.store.sweeps() == ["one-base-vs-head"]
    code = world.run("gate", "sweep.yaml", *SAME)
    assert world.run("gate", "one-base-vs-head") == code
    with other_head():
        assert world.run("gate", "sweep.yaml", *SAME) == 5
    assert "one-base-vs-head measured head at" in world.err
    return code


@scenario("gate", "a head that was edited since it was measured")
def _(world: World) -> int:
    for package in ("bench", "mfsdp_core"):
        shutil.copytree(ROOT / package, world.folder / "head" / package)
    head = ("--arm", "base=.", "--arm", f"head=checkout:{world.folder / 'head'}")
    assert world.run("run", world.file(ONE_CELL), *head, *BLOCKS) == 0
    assert world.run("gate", "sweep.yaml", *head) == 0
    with (world.folder / "head/bench/loop.py").open("a") as stream:
        stream.write("# edited\n")
    code = world.run("gate", "sweep.yaml", *head)
    assert "measured head at" in world.err
    # What no rank runs is not the code of an arm.
    with (world.folder / "head/bench/loop.py").open("w") as stream:
        stream.write((ROOT / "bench/loop.py").read_text())
    (world.folder / "head/bench/cli/app.py").write_text("")
    assert world.run("gate", "sweep.yaml", *head) == 0
    return code


@scenario("gate", "a head whose runs all failed, after another that was good")
def _(world: World) -> int:
    measured_twice(world)
    world.states = {"base": "crashed"}
    with other_head():
        assert world.run("run", "sweep.yaml", *SAME, *BLOCKS, "--block-retries", "0") == 3
        code = world.run("gate", "sweep.yaml", *SAME)
    assert "crashed: as the test wants" in world.err
    return code


@scenario("gate", "settings in the file as arms, failing with new code")
def _(world: World) -> int:
    patch = pytest.MonkeyPatch()
    file = world.file(f"{ONE_CELL}interleave: true\n{BY_SETTINGS}")
    assert world.run("run", file, *BLOCKS) == 0
    assert world.run("gate", file) == world.run("gate", "one") == 0
    try:
        edited(patch)
        assert world.run("gate", file) == 5
        assert "(code 0123456789abcdef)" in world.err
        world.states = {"base": "crashed"}
        assert world.run("run", file, *BLOCKS, "--block-retries", "0") == 3
        assert world.run("gate", file) == 3
        return world.run("gate", "one")  # by its id too: the plan says what counts
    finally:
        patch.undo()


@scenario("gate", "a budget for arms whose code has changed since they were decided")
def _(world: World) -> int:
    patch = pytest.MonkeyPatch()
    policy = world.folder / "gates.yaml"
    policy.write_text("metrics: {step_time: {gate: advisory}}\n")
    file = world.file(f"{ONE_CELL}interleave: true\n{BY_SETTINGS}")
    asked = ("--budget", "5m", "--policy", policy)
    try:
        assert world.run("gate", file, *asked) == 0
        assert len(list(world.store.records())) == 2
        edited(patch)
        code = world.run("gate", file, *asked)
    finally:
        patch.undo()
    assert len(list(world.store.records())) == 4
    return code


@scenario("gate", "a sweep file that was changed since it ran")
def _(world: World) -> int:
    file = world.file(ONE_CELL)
    assert world.run("run", file, *SAME, *BLOCKS) == 0
    with file.open("a") as stream:
        stream.write("overrides:\n  - {when: {engine.name: ddp}, set: {train.steps: 30}}\n")
    code = world.run("gate", file, *SAME)
    assert "was measured with configuration" in world.err
    return code


@scenario("gate", "a cell that was added to the file since it ran")
def _(world: World) -> int:
    assert world.run("run", world.file(TWO_CELLS.replace(", mfsdp", "")), *SAME, *BLOCKS) == 0
    file = world.file(TWO_CELLS)
    code = world.run("gate", file, *SAME)
    assert "mfsdp failed (it was planned and has not run)" in world.out
    assert world.run("gate", file, *SAME, "--only", "ddp") == 0
    return code


@scenario("gate", "a baseline, and a file that was measured with other code")
def _(world: World) -> int:
    patch = pytest.MonkeyPatch()
    file = world.file(ONE_CELL)
    assert world.run("run", file) == 0
    assert world.run("baseline", "save", "main", "one") == 0
    asked = ("gate", file, "--baseline", "main")
    try:
        assert world.run(*asked) == 0
        edited(patch)
        code = world.run(*asked)
        assert "base was measured at" in world.err
        world.states = {"base": "crashed"}
        assert world.run("run", file) == 3
        assert world.run(*asked) == 3
    finally:
        patch.undo()
    # The code of before is back: nothing is to be run again, and its runs count.
    assert world.run("run", file) == 0
    assert "(0 now, 1 before)" in world.err
    assert world.run(*asked) == 0
    return code


@scenario("gate", "a block lost to a failed run")
def _(world: World) -> int:
    one = {"zero3": CELLS["zero3"]}
    record_arms(world.store, {"base": Arm(), "head": Arm(states={3: "interrupted"})}, cells=one)
    assert world.run("gate", "gate", "--only", "zero3") == 0
    lost = {"base": Arm(), "head": Arm(states={3: "crashed"})}
    record_arms(world.store, lost, sweep="lost", cells=one)
    code = world.run("gate", "lost")
    assert "zero3 failed (block 3: head: crashed: as the test wants)" in world.out
    return code


@scenario("gate", "a repeat that failed, of a sweep without arms")
def _(world: World) -> int:
    one = {"zero3": CELLS["zero3"]}
    record_arms(world.store, {None: Arm()}, sweep="good", cells=one)
    record_arms(world.store, {None: Arm(states={3: "preempted"})}, sweep="ended", cells=one)
    record_arms(world.store, {None: Arm(states={3: "hang"})}, sweep="lost", cells=one)
    assert world.run("baseline", "save", "main", "good") == 0
    assert world.run("gate", "ended", "--baseline", "main") == 0
    code = world.run("gate", "lost", "--baseline", "main")
    assert "zero3 failed (repeat 3: hang: as the test wants)" in world.out
    assert world.run("gate", "lost", "--against", "good") == code
    # A good run of the same code does not make up for one that failed after it.
    record_arms(world.store, {None: Arm(states={1: "crashed"})}, sweep="good", cells=one, blocks=2)
    assert world.run("gate", "good", "--baseline", "main") == code
    assert "zero3 failed (repeat 1: crashed: as the test wants)" in world.out
    return code


@scenario("gate", "confirmation blocks that failed")
def _(world: World) -> int:
    from outcomes_of_gates import timed

    file = world.file("name: gate\n")
    with timed(world, lambda arm, _: 11.0 if arm == "head" else 10.0):
        assert world.run("run", file, *SAME, "--interleave", "--repeat", "6") == 0
    world.states = {"base": "crashed"}
    code = world.run("gate", file, *SAME, "--confirm", "2")
    assert "the regression stays as it was" in world.err
    return code


@scenario("gate", "--arm with the id of a sweep")
@scenario("compare", "--arm with the id of a sweep, or with two sides")
def _(world: World) -> int:
    measured_twice(world)
    (name,) = world.store.sweeps()
    code = world.run("gate", name, *SAME)
    assert "--arm goes with a sweep file" in world.err
    assert world.run("compare", name, *SAME) == code
    assert world.run("compare", "sweep.yaml", name, *SAME) == code
    return code
