"""Outcomes of `gate`, `noise`, `baseline` and of `compare` on arms. No rank is started."""

from __future__ import annotations

import contextlib
import json
import random
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from git_repository import git
from outcome_scenarios import TWO_CELLS, World, scenario
from recorded_runs import CELLS, Arm, record_arms
from stand_in_runs import with_end, with_steps

ARMS = ("--arm", "base=.", "--arm", "head=.")
ONE = {"zero3": CELLS["zero3"]}
OTHER_MACHINE = {"cpu_name": "Another CPU", "cpu_count": 64}


def both(world: World, head: Arm, **how: Any) -> None:
    """A sweep `gate` whose two arms were run in eight blocks."""
    record_arms(world.store, {"base": Arm(), "head": head}, **{"noise": 0.003, **how})


@contextlib.contextmanager
def timed(world: World, milliseconds: Any) -> Iterator[None]:
    """Launches whose steps take `milliseconds(arm, block)`."""
    rng = random.Random(7)

    def launch(resolved, folder, **_: object):
        arm, block = folder.status.arm, folder.status.repeat
        folder.write_environment({"cpu_name": "Example CPU", "cpu_count": 2})
        with_steps(resolved, folder, milliseconds(arm, block) * rng.gauss(1.0, 0.002), 8)
        return with_end(folder)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("bench.cli.chosen_sweep.launch", launch)
        yield


# -- gate --------------------------------------------------------------------------------------


@scenario("gate", "every required metric equal or better")
def _(world: World) -> int:
    both(world, Arm(slower=0.9))
    code = world.run("gate", "gate", "--strict")
    assert "PASSED" in world.out
    assert "improved" in world.out
    return code


@scenario("gate", "a required metric regressed")
def _(world: World) -> int:
    for index, worse in enumerate((Arm(slower=1.1), Arm(more_memory=1.02), Arm(loss_shift=1e-3))):
        both(world, worse, sweep=f"gate{index}", cells=ONE)
        assert world.run("gate", f"gate{index}") == 1
        assert "REGRESSED: 1 regressed" in world.out
    both(world, Arm(more_bytes=1.001), cells=ONE, blocks=1)
    return world.run("gate", "gate")  # counted bytes gate with one run a side


@scenario("gate", "only an advisory metric regressed")
def _(world: World) -> int:
    both(world, Arm(slower=1.1), cells=ONE)
    policy = world.folder / "gates.yaml"
    policy.write_text("metrics:\n  step_time: {gate: advisory}\n")
    code = world.run("gate", "gate", "--policy", policy, "--strict")
    assert "regressed (advisory)" in world.out
    return code


@scenario("gate", "undecided")
def _(world: World) -> int:
    both(world, Arm(slower=1.5), cells=ONE, blocks=3)
    code = world.run("gate", "gate")
    assert "cannot decide with 3 blocks" in world.out
    assert "at least 6 blocks" in world.out
    assert "undecided" in world.err
    return code


@scenario("gate", "undecided, with --strict")
def _(world: World) -> int:
    both(world, Arm(), cells=ONE, blocks=3)
    return world.run("gate", "gate", "--strict")


@scenario("gate", "a cell failed, even if another regressed")
def _(world: World) -> int:
    record_arms(
        world.store,
        {"base": Arm(), "head": Arm(slower=1.2, states=dict.fromkeys(range(8), "crashed"))},
        cells=ONE,
    )
    assert world.run("gate", "gate") == 3
    assert "head: crashed: as the test wants" in world.err
    both(world, Arm(slower=1.2), sweep="mixed", cells={"ddp": CELLS["ddp"]})
    bad = Arm(states=dict.fromkeys(range(8), "hang"))
    record_arms(world.store, {"base": Arm(), "head": bad}, sweep="mixed", cells=ONE)
    code = world.run("gate", "mixed")
    assert "FAILED TO MEASURE: 1 regressed" in world.out
    # The first line is what a person reads in a CI log: it names who is to blame.
    assert (
        "zero3 failed (no complete block (head: hang: as the test wants))"
        in world.out.splitlines()[0]
    )
    assert "ddp regressed: step_time +20." in world.out.splitlines()[0]
    return code


@scenario("gate", "nothing was measured")
def _(world: World) -> int:
    world.sweep(ddp="crashed", mfsdp="crashed")
    both(world, Arm(), sweep="good", cells=ONE)
    assert world.run("baseline", "save", "main", "good", "--arm", "base") == 0
    return world.run("gate", "two", "--baseline", "main")


@scenario("gate", "a required metric was not measured")
def _(world: World) -> int:
    record_arms(
        world.store,
        {"base": Arm(), "head": Arm(states=dict.fromkeys(range(8), "unstable"), steady=False)},
        cells=ONE,
    )
    code = world.run("gate", "gate")
    assert "no steady time to compare" in world.out
    return code


@scenario("gate", "the baseline of another machine")
def _(world: World) -> int:
    record_arms(world.store, {None: Arm(hardware=OTHER_MACHINE)}, sweep="there", cells=ONE)
    record_arms(world.store, {None: Arm()}, sweep="here", cells=ONE)
    assert world.run("baseline", "save", "main", "there") == 0
    code = world.run("gate", "here", "--baseline", "main")
    assert "hardware differs: Another CPU, 64 cores" in world.out
    return code


@scenario("gate", "a baseline of other configurations or of another schema")
def _(world: World) -> int:
    record_arms(world.store, {None: Arm()}, sweep="one", cells=ONE)
    record_arms(world.store, {None: Arm()}, sweep="other", cells={"ddp": CELLS["ddp"]})
    assert world.run("baseline", "save", "main", "one") == 0
    assert world.run("gate", "other", "--baseline", "main") == 5
    assert "NOT COMPARABLE" in world.out
    file = world.store.baselines.path("main")
    newer = re.sub(r'("baseline_version": )\d+', r"\g<1>99", file.read_text())
    file.write_text(newer)
    return world.run("gate", "one", "--baseline", file)


@scenario("gate", "a regression, and cells that cannot be compared")
def _(world: World) -> int:
    record_arms(world.store, {None: Arm()}, sweep="before", cells=ONE, noise=0.003)
    record_arms(world.store, {None: Arm(slower=1.3)}, sweep="after", noise=0.003)
    code = world.run("gate", "after", "--against", "before")
    assert "not comparable: ddp" in world.out
    assert "were not interleaved" in world.out
    return code


@scenario("gate", "a regression that more blocks confirm")
def _(world: World) -> int:
    with timed(world, lambda arm, _: 11.0 if arm == "head" else 10.0):
        file = world.file("name: gate\nmatrix: {product: {engine.strategy: [no_shard, optim]}}\n")
        assert world.run("run", file, *ARMS, "--interleave", "--repeat", "6") == 0
        code = world.run("gate", file, *ARMS, "--only", "optim", "--confirm", "2")
    assert "running 2 more blocks of 1 of 2 cells" in world.err
    assert "8 blocks" in world.out
    runs = Counter(record.status.cell for record in world.store.records())
    assert runs == {"no_shard": 12, "optim": 16}
    return code


@scenario("gate", "a regression that more blocks do not confirm")
def _(world: World) -> int:
    with timed(world, lambda arm, block: 11.0 if arm == "head" and block < 6 else 10.0):
        file = world.file("name: gate\n")
        assert world.run("run", file, *ARMS, "--interleave", "--repeat", "6") == 0
        assert world.run("gate", file, *ARMS) == 1
        return world.run("gate", file, *ARMS, "--confirm", "6")


@scenario("gate", "blocks within a budget, until the change is known")
def _(world: World) -> int:
    with timed(world, lambda arm, _: 11.0 if arm == "head" else 10.0):
        file = world.file(TWO_CELLS)
        assert world.run("gate", file, *ARMS, "--budget", "10m") == 1
        assert re.search(r"ddp: step_time regressed after \d blocks", world.err)
        assert "2 of 2 comparisons decided in" in world.err
        assert "valid after every block" in world.out
        # What was decided by looking is judged as such for ever, and nothing runs again.
        assert world.run("gate", file, *ARMS, "--budget", "10m", "--json") == 1
        assert '"sequential": true' in world.out
        assert "RunStarted" not in world.err
        assert "[1/" not in world.err
        return world.run("gate", file, *ARMS)


@scenario("gate", "one of two cells within a budget")
def _(world: World) -> int:
    with timed(world, lambda arm, _: 11.0 if arm == "head" else 10.0):
        file = world.file(TWO_CELLS)
        code = world.run("gate", file, *ARMS, "--budget", "10m", "--only", "dd*")
    assert "1 of 1 comparisons decided in" in world.err
    assert {record.status.cell for record in world.store.records()} == {"ddp"}
    return code


@scenario("gate", "blocks within a budget, of code that does not differ")
def _(world: World) -> int:
    with timed(world, lambda *_: 10.0):
        file = world.file(TWO_CELLS)
        code = world.run("gate", file, *ARMS, "--budget", "10m", "--strict")
    assert "PASSED" in world.out
    assert world.run("status", "two-base-vs-head") == 0
    (name,) = world.store.sweeps()
    asked = json.loads((world.folder / f"results/sweeps/{name}/plan.json").read_text())
    assert asked["until_decided"]
    repeats = [cell["repeats"] for cell in asked["cells"]]
    assert world.run("status", "two-base-vs-head") == 0
    assert sum(repeats) * 2 == len(list(world.store.records()))
    return code


@scenario("gate", "a budget that ends before a decision")
def _(world: World) -> int:
    rng = random.Random(5)
    with timed(world, lambda *_: 10.0 * rng.gauss(1.0, 0.2)):
        code = world.run("gate", world.file("name: gate\n"), *ARMS, "--budget", "2s", "--strict")
    assert "0 of 1 comparisons decided" in world.err
    assert re.search(r"step_time is undecided after \d+ blocks?: about \d+ more", world.err)
    return code


@scenario("gate", "a budget when no required metric needs blocks")
def _(world: World) -> int:
    policy = world.folder / "gates.yaml"
    policy.write_text("metrics: {step_time: {gate: advisory}}\n")
    with timed(world, lambda *_: 10.0):
        code = world.run("gate", world.file(TWO_CELLS), *ARMS, "--budget", "5m", "--policy", policy)
    assert len(list(world.store.records())) == 4
    return code


@scenario("gate", "an invalid budget")
def _(world: World) -> int:
    both(world, Arm(), cells=ONE)
    file = world.file(TWO_CELLS)
    assert world.run("gate", file, *ARMS, "--budget", "soon") == 2
    assert "expected a time such as 10m" in world.err
    assert world.run("gate", "gate", "--budget", "10m") == 2
    assert "needs the sweep file" in world.err
    return world.run("gate", file, *ARMS, "--budget", "10m", "--confirm", "2")


@scenario("gate", "an invalid policy file")
def _(world: World) -> int:
    both(world, Arm(), cells=ONE)
    policy = world.folder / "gates.yaml"
    policy.write_text("metrics:\n  step_time: {tolerance: a bit}\n  speed: {}\n")
    code = world.run("gate", "gate", "--policy", policy)
    assert "gates.yaml:2: tolerance: expected a fraction" in world.err
    assert "gates.yaml:3: unknown key 'speed'" in world.err
    return code


@scenario("gate", "an unknown sweep, baseline or arm, or options that exclude each other")
def _(world: World) -> int:
    both(world, Arm(), cells=ONE)
    assert world.run("gate", "gaet") == 2
    assert "did you mean 'gate'" in world.err
    assert world.run("gate", "gate", "--head", "haed") == 2
    assert world.run("gate", "gate", "--baseline", "main", "--head", "head") == 2
    assert world.run("gate", "gate", "--baseline", "main", "--confirm", "3") == 2
    assert world.run("gate", "gate", "--confirm", "3") == 0  # nothing to confirm
    return world.run("gate", "gate", "--baseline", "main", "--against", "gate")


@scenario("compare", "the arms of one sweep")
def _(world: World) -> int:
    both(world, Arm(slower=1.1), cells=ONE)
    code = world.run("compare", "gate")  # says what it sees and judges nobody
    assert "regressed" in world.out
    return code


# -- noise, baseline ---------------------------------------------------------------------------


@scenario("noise", "enough steady blocks")
def _(world: World) -> int:
    with timed(world, lambda *_: 10.0):
        code = world.run("noise", world.file(TWO_CELLS), "--repeat", "6")
    assert "noise floor" in world.out
    assert world.run("noise") == 0
    assert "0 minutes ago" in world.out
    assert "Example CPU, 2 cores" in world.out
    # Arms are compared by time, so what a sweep packs runs one after the other here.
    packed = "name: packed\npack: true\nbase: {launch.ranks: 1, engine.name: single}\n"
    with timed(world, lambda *_: 10.0):
        assert world.run("noise", world.file(packed), "--repeat", "6") == code
    return code


@scenario("noise", "nothing is calibrated yet")
def _(world: World) -> int:
    assert world.store.noise.names() == []
    code = world.run("noise")
    assert "no noise calibration" in world.err
    return code


@scenario("noise", "fewer blocks than an interval needs")
def _(world: World) -> int:
    code = world.run("noise", world.file(TWO_CELLS), "--repeat", "5")
    assert "at least 6 blocks" in world.err
    return code


@scenario("noise", "too few blocks gave a steady time")
def _(world: World) -> int:
    world.states = {"ddp": "crashed", "mfsdp": "crashed"}
    code = world.run("noise", world.file(TWO_CELLS), "--repeat", "6")
    assert world.store.noise.names() == []
    assert "crashed: as the test wants -- mfsdp-bench logs" in world.err
    return code


@scenario("baseline", "saved, listed, promoted")
def _(world: World) -> int:
    record_arms(world.store, {None: Arm()}, cells=ONE)
    record_arms(world.store, {None: Arm(slower=0.9)}, sweep="faster", cells=ONE)
    assert world.run("baseline", "save", "main", "gate") == 0
    assert world.run("baseline", "save", "new", "faster") == 0
    assert world.run("baseline", "promote", "new", "main", "--reason", "fewer copies") == 0
    assert "new (faster, commit 0123456789ab): fewer copies" in (
        world.store.baselines.path("main").read_text()
    )
    return world.run("baseline", "list")


@scenario("baseline", "a name that is taken")
def _(world: World) -> int:
    record_arms(world.store, {None: Arm()}, cells=ONE)
    assert world.run("baseline", "save", "main", "gate") == 0
    code = world.run("baseline", "save", "main", "gate")
    assert "baseline promote OTHER main" in world.err
    return code


@scenario("baseline", "an unknown sweep, arm or baseline")
def _(world: World) -> int:
    both(world, Arm(), cells=ONE)
    assert world.run("baseline", "save", "main", "gaet") == 2
    assert world.run("baseline", "save", "main", "gate") == 2
    assert "base, head; name one of them" in world.err
    assert world.run("baseline", "save", "../main", "gate", "--arm", "head") == 2
    return world.run("baseline", "promote", "new", "main")


@scenario("baseline", "a sweep without a finished run")
def _(world: World) -> int:
    world.sweep(ddp="crashed", mfsdp="crashed")
    return world.run("baseline", "save", "main", "two")


@scenario("baseline", "promoted over one of other hardware or configurations")
def _(world: World) -> int:
    for name, arm, cell in (
        ("here", Arm(), "zero3"),
        ("there", Arm(hardware=OTHER_MACHINE), "zero3"),
        ("ddp", Arm(), "ddp"),
    ):
        record_arms(world.store, {None: arm}, sweep=name, cells={cell: CELLS[cell]}, blocks=2)
        assert world.run("baseline", "save", name, name) == 0
    assert world.run("baseline", "promote", "there", "here") == 5
    assert "hardware differs" in world.err
    return world.run("baseline", "promote", "ddp", "here")


# -- bisect ------------------------------------------------------------------------------------


@scenario("bisect", "an unknown metric or ref, or refs without commits between")
def _(world: World) -> int:
    file = world.file(TWO_CELLS)
    for wrong in (
        ("--good", "HEAD", "--metric", "wire_byte"),
        ("--good", "no-such-ref", "--metric", "wire_bytes"),
        ("--good", "HEAD", "--metric", "wire_bytes"),
    ):
        assert world.run("bisect", file, *wrong) == 2
    return 2


@scenario("bisect", "good or bad cannot be measured")
def _(world: World) -> int:
    repository = Path(world.file(TWO_CELLS)).parent / "no_engine"
    repository.mkdir()
    git(repository, "init", "-q")
    for message in ("one", "two"):
        git(repository, "commit", "-q", "--allow-empty", "-m", message)
    asked = ("--repo", str(repository), "--good", "HEAD~1", "--metric", "wire_bytes")
    code = world.run("bisect", world.file(TWO_CELLS), *asked)
    assert "holds no Python package" in world.err
    return code
