"""Outcomes of `run` and `cancel` with jobs of a cluster, on a machine without one."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
from outcome_scenarios import TWO_CELLS, World, scenario


def world_without_slurm(world: World, patch: pytest.MonkeyPatch) -> None:
    patch.setenv("PATH", "/nowhere")
    patch.setenv("XDG_CONFIG_HOME", str(world.folder))


@scenario("run", "jobs of a cluster, where there is no Slurm")
def _(world: World) -> int:
    with pytest.MonkeyPatch.context() as patch:
        world_without_slurm(world, patch)
        code = world.run("run", world.file(TWO_CELLS), "--launcher", "slurm")
    assert "sinfo is not installed here" in world.err
    return code


@scenario("run", "options of jobs without jobs")
def _(world: World) -> int:
    file = world.file(TWO_CELLS)
    assert world.run("run", file, "--launcher", "slrm") == 2
    assert world.run("run", file, "--max-jobs", "3") == 2
    assert world.run("run", file, "--launcher", "slurm", "--slurm", "partition") == 2
    return world.run("run", file, "--launcher", "slurm", "--slurm", "partiton=gpu")


@scenario("run", "scripts to submit by hand")
def _(world: World) -> int:
    with pytest.MonkeyPatch.context() as patch:
        world_without_slurm(world, patch)
        code = world.run("run", world.file(TWO_CELLS), "--launcher", "print")
    (script,) = world.out.split()
    text = Path(script).read_text()
    assert "#SBATCH --array=0-1%" in text
    (line,) = (line for line in text.splitlines() if line.startswith("exec "))
    assert any(word.startswith("PYTHONPATH=") for word in shlex.split(line))
    return code


@scenario("cancel", "a sweep that no job makes")
def _(world: World) -> int:
    assert world.run("cancel", "nothing") == 2
    world.run("run", world.file(TWO_CELLS))
    return world.run("cancel", "two")


@scenario("cancel", "jobs that are all over")
def _(world: World) -> int:
    with pytest.MonkeyPatch.context() as patch:
        world_without_slurm(world, patch)
        world.run("run", world.file(TWO_CELLS), "--launcher", "print")
        (file,) = (world.folder / "results" / "sweeps" / "two" / "jobs").glob("*.json")
        document = json.loads(file.read_text())
        file.write_text(json.dumps(document | {"id": "7", "over": True}))
        return world.run("cancel", "two")
