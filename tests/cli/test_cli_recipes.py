"""The commands of docs/recipes, run by a shell in a clone of a repository, without ranks."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest
from ruamel.yaml import YAML

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "docs" / "recipes"
PLACE = "file=docs/recipes/three_cells.yaml,title=step_time regressed"
STAND_INS = [str(ROOT / "tests" / "run"), str(ROOT / "tests")]
PACKAGES = ("bench", "mfsdp_core", "sweeps", "reports", "docs", "pyproject.toml")

# `mfsdp-bench` with runs that cost nothing: 10 ms per step, equal losses; `validate` has one case.
COMMAND = """#!/bin/sh
"exec" "{python}" "$0" "$@"
import sys
sys.path[:0] = [{root!r}, *{stand_ins!r}]
from bench.cli.main import run_command_line
from sweeps import selected_sweep
from stand_in_runs import with_end, with_steps

def launch(resolved, folder, **_):
    folder.write_environment({{"cpu_name": "Example CPU", "cpu_count": 2}})
    arm, block = folder.status.arm, folder.status.repeat
    level = 11.0 if arm == {slow!r} else 10.0
    with_steps(resolved, folder, level * (1 + 0.001 * ((block * 7 + len(arm or "")) % 5)), 64)
    return with_end(folder)

selected_sweep.launch = launch
if sys.argv[1] == "validate":
    sys.argv += ["--case", "mfsdp/optim/2/stack/fp64/k3"]
sys.exit(run_command_line(sys.argv[1:]))
"""


class Clone:
    """A clone with an `origin/main`, and `.venv/bin/mfsdp-bench` in it."""

    def __init__(self, folder: Path, slow: str = "") -> None:
        origin = folder / "origin"
        origin.mkdir()
        for name in PACKAGES:
            if (ROOT / name).is_dir():
                shutil.copytree(
                    ROOT / name, origin / name, ignore=shutil.ignore_patterns("__pycache__")
                )
            else:
                shutil.copy(ROOT / name, origin / name)
        (origin / ".gitignore").write_text("__pycache__/\nresults/\n.venv/\n")
        self.summary = folder / "summary.md"
        self.folder = folder / "clone"
        identity = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
        for command in (
            ["git", "init", "-q", "-b", "main", str(origin)],
            ["git", "-C", str(origin), "add", "."],
            ["git", *identity, "-C", str(origin), "commit", "-qm", "a"],
            ["git", "clone", "-q", str(origin), str(self.folder)],
        ):
            # Older than what the nightly gate compares with.
            dated = os.environ | {"GIT_COMMITTER_DATE": "2026-01-01T00:00:00Z"}
            subprocess.run(command, check=True, timeout=200, capture_output=True, env=dated)
        command = self.folder / ".venv" / "bin" / "mfsdp-bench"
        command.parent.mkdir(parents=True)
        command.write_text(
            COMMAND.format(
                python=sys.executable, root=str(self.folder), stand_ins=STAND_INS, slow=slow
            )
        )
        command.chmod(0o755)

    def shell(self, text: str) -> subprocess.CompletedProcess[str]:
        """Run `text` as CI does, with what GitHub and GitLab set."""
        given = {
            "BASE": "origin/main",
            "GITHUB_STEP_SUMMARY": str(self.summary),
            "PYTHONPATH": str(self.folder),
        }
        return subprocess.run(
            ["bash", "-eo", "pipefail", "-c", text],
            cwd=self.folder,
            env=os.environ | given,
            capture_output=True,
            text=True,
            check=False,
            timeout=200,
        )


def document(name: str) -> Any:
    return YAML(typ="safe", pure=True).load((RECIPES / name).read_text())


def commands(name: str, job: str = "gate") -> list[str]:
    """Of a job; `make venv` installs from the network, and what it makes is stood in for."""
    jobs = document(name)
    if name.startswith("gitlab"):
        found = [*jobs["gate"]["before_script"], *jobs[job]["script"]]
    else:
        found = [step["run"] for step in jobs["jobs"][job]["steps"] if "run" in step]
    assert found[0].strip() == "make venv"
    return found[1:]


NIGHTLY = pytest.mark.nightly


@pytest.mark.parametrize(
    ("recipe", "job", "slow", "code", "says"),
    [
        ("github-actions.yml", "gate", "", 0, "PASSED"),
        # Slower times only advise on a shared runner, and fail the gate of a night.
        pytest.param("github-actions.yml", "gate", "head", 0, "(advisory)", marks=NIGHTLY),
        pytest.param("gitlab-ci.yml", "gate", "", 0, "PASSED", marks=NIGHTLY),
        pytest.param("github-nightly.yml", "gate", "head", 1, "step_time", marks=NIGHTLY),
        pytest.param("gitlab-ci.yml", "nightly", "head", 1, "step_time", marks=NIGHTLY),
    ],
)
def test_the_commands_of_a_recipe_judge_and_write_what_it_promises(
    tmp_path, recipe, job, slow, code, says
):
    clone = Clone(tmp_path, slow)
    for command in commands(recipe, job):
        done = clone.shell(command)
        assert done.returncode == code, done.stderr
    assert says in done.stdout
    junit = clone.folder / "results" / "gate.xml"
    assert ET.parse(junit).getroot().get("failures") == ("3" if code else "0")
    if recipe.startswith("gitlab"):
        named = document(recipe)["gate"]["artifacts"]["reports"]["junit"]
        assert (clone.folder / named).is_file()
    else:
        assert ("REGRESSED" if code else "PASSED") in clone.summary.read_text()
        assert done.stdout.count(f"::error {PLACE}::") == (3 if code else 0)


@pytest.mark.nightly
def test_every_night_writes_the_points_that_github_action_benchmark_reads(tmp_path):
    clone = Clone(tmp_path)
    for command in commands("github-benchmark.yml", "point"):
        done = clone.shell(command)
        assert done.returncode == 0, done.stderr
    points = json.loads((clone.folder / "points" / "smaller.json").read_text())
    assert {"name", "unit", "value"} <= points[0].keys()


@pytest.mark.nightly
def test_the_commands_of_the_page_run_in_their_order(tmp_path):
    clone = Clone(tmp_path)
    page = (RECIPES / "README.md").read_text()
    blocks = re.findall(r"^```sh\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 3
    for block in blocks:
        done = clone.shell(block)
        assert done.returncode == 0, f"{block}\n{done.stdout}\n{done.stderr}"
    assert "noise floor" in done.stdout
    assert "were not interleaved" in done.stdout


def test_two_releases_of_torch_are_planned(in_process, monkeypatch):
    monkeypatch.chdir(RECIPES / "torch_versions")
    code, out, err = in_process("plan", "sweep.yaml")
    assert code == 0, err
    assert "working tree, torch==2.12.0" in out
    assert "cells 2, to run 2, pruned 0" in out


@pytest.mark.nightly
@pytest.mark.processes
def test_the_engine_of_two_releases_runs_under_the_torch_that_is_here(cli):
    shutil.copytree(RECIPES / "torch_versions", cli.folder, dirs_exist_ok=True)
    text = (cli.folder / "sweep.yaml").read_text()
    cli.sweep(text.partition("arms:")[0])
    done = cli.run("run", "sweep.yaml", "--set", "train.steps=6")
    assert "2 of 2 runs finished" in done.stdout + done.stderr
