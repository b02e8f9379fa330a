"""docs/recipes/bisect.sh under a real `git bisect run`, and a gate that ends as a file says."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from git_repository import git

RECIPE = Path(__file__).parents[2] / "docs" / "recipes" / "bisect.sh"
COUNT, FIRST_BAD, SKIPPED = 12, 7, 5
#: Ends as the file `code` of the commit says that is judged, and notes how it was called.
GATE = """#!/bin/sh
echo "$*" >> called
[ "$1" = gate ] || exit 0
commit=${6#head=}
exit "$(git -C ../bisected show "$commit:code")"
"""


@pytest.fixture
def harness(tmp_path) -> Path:
    """A checkout with the recipe and the gate."""
    folder = tmp_path / "harness"
    (folder / "docs" / "recipes").mkdir(parents=True)
    shutil.copy(RECIPE, folder / "docs" / "recipes")
    command = folder / ".venv" / "bin" / "mfsdp-bench"
    command.parent.mkdir(parents=True)
    command.write_text(GATE)
    command.chmod(0o755)
    return folder


def bisected(tmp_path: Path, codes: list[int]) -> subprocess.CompletedProcess[str]:
    """Commits c0, c1, ..., of which the first is good and the last is bad."""
    folder = tmp_path / "bisected"
    folder.mkdir()
    git(folder, "init", "-q", "-b", "main")
    for number, code in enumerate(codes):
        (folder / "code").write_text(str(code))
        (folder / "number").write_text(str(number))
        git(folder, "add", ".")
        git(folder, "commit", "-qm", f"change {number}")
        git(folder, "tag", f"c{number}")
    git(folder, "bisect", "start", f"c{len(codes) - 1}", "c0")
    recipe = tmp_path / "harness" / "docs" / "recipes" / "bisect.sh"
    return subprocess.run(
        ["git", "bisect", "run", str(recipe), "c0", "my.yaml", "--only", "cell"],
        cwd=folder,
        env={k: v for k, v in os.environ.items() if not k.startswith("GIT_")},
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )


def test_git_finds_the_first_commit_at_which_the_gate_fails_and_skips_what_it_cannot_judge(
    tmp_path, harness
):
    codes = [0] * FIRST_BAD + [1] * (COUNT - FIRST_BAD)
    codes[SKIPPED] = 3
    done = bisected(tmp_path, codes)
    assert done.returncode == 0, done.stderr
    assert "is the first bad commit" in done.stdout
    assert git(tmp_path / "bisected", "rev-parse", "refs/bisect/bad") == git(
        tmp_path / "bisected", "rev-parse", f"c{FIRST_BAD}"
    )
    run, gate = (harness / "called").read_text().splitlines()[:2]
    assert run.startswith("run my.yaml --arm base=c0 --arm head=")
    assert run.endswith(" --repeat 1")
    assert gate.endswith(" --strict --only cell")


def test_wrong_usage_ends_the_search(tmp_path, harness):
    done = bisected(tmp_path, [0, 2, 2, 1])
    assert done.returncode != 0
    assert "is the first bad commit" not in done.stdout
