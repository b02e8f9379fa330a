"""Outcomes of `run` and `cancel` with jobs of a cluster, on a machine without one."""

from __future__ import annotations

import pytest
from outcome_scenarios import TWO_CELLS, World, scenario

from sweeps.jobs import JobArray
from sweeps.plan import Plan


def world_without_slurm(world: World, patch: pytest.MonkeyPatch) -> None:
    patch.setenv("PATH", "/nowhere")
    patch.setenv("XDG_CONFIG_HOME", str(world.folder))


@scenario("run", "cluster jobs without Slurm")
def _(world: World) -> int:
    with pytest.MonkeyPatch.context() as patch:
        world_without_slurm(world, patch)
        code = world.run("run", world.file(TWO_CELLS), "--launcher", "slurm")
    assert "sinfo is not installed here" in world.err
    return code


@scenario("run", "job options without jobs")
def _(world: World) -> int:
    file = world.file(TWO_CELLS)
    assert world.run("run", file, "--launcher", "slrm") == 2
    assert world.run("run", file, "--launcher-option", "max_jobs=3") == 2
    assert world.run("run", file, "--launcher", "slurm", "--launcher-option", "partition") == 2
    for wrong, says in (
        (("profile=[a]",), "expected the name of a profile, as profile=debug, found ['a']"),
        (("profile.x=1",), "expected the name of a profile, as profile=debug, found {'x': 1}"),
        (("profile=~",), "found None; without this option it is the one called default"),
        (("options=1", "options.x=2"), "expected options to be a section, found 1"),
    ):
        options = [word for one in wrong for word in ("--launcher-option", one)]
        assert world.run("run", file, "--launcher", "slurm", *options) == 2
        assert says in world.err
    return world.run("run", file, "--launcher", "slurm", "--launcher-option", "partiton=gpu")


@scenario("cancel", "a sweep without jobs")
def _(world: World) -> int:
    assert world.run("cancel", "nothing") == 2
    world.run("run", world.file(TWO_CELLS))
    return world.run("cancel", "two")


@scenario("cancel", "jobs that have all ended")
def _(world: World) -> int:
    world.run("run", world.file(TWO_CELLS))
    plan = Plan.from_document(world.store.read_plan("two"))
    JobArray("two.1", plan, ("ddp",), {}, {}, id="7", over=True).write(world.store)
    return world.run("cancel", "two")
