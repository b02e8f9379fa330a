"""`bisect` over a repository of many commits, with runs that are stood in for."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from git_repository import git
from stand_in_runs import with_end, with_steps

from bench.cli import bisecting
from bench.cli.chosen_sweep import ChosenSweep
from bench.cli.main import run_command_line
from bench.launch.git import commit_of
from bench.store import StoreLockedError
from sweeps.execution import Side
from sweeps.plan import PlannedArm

COUNT = 12
FIRST_BAD = 7
CRASHING = 8
SWEEP = """\
name: bisected
base:
  model: {preset: debug}
  data: {kind: markov}
  train: {steps: 12, global_batch: 4, micro_batch: 2, seq_len: 16}
  launch: {ranks: 1}
matrix: {product: {engine.name: [single]}}
"""


@pytest.fixture(scope="module")
def repository(tmp_path_factory) -> Path:
    """Commits tagged c0 to c11; c7 changes the number in the file `sent`."""
    folder = tmp_path_factory.mktemp("repository")
    git(folder, "init", "-q", "-b", "main")
    for number in range(COUNT):
        (folder / "number").write_text(str(number))
        (folder / "sent").write_text("100" if number < FIRST_BAD else "104")
        git(folder, "add", ".")
        git(folder, "commit", "-qm", f"change {number}")
        git(folder, "tag", f"c{number}")
    return folder


@pytest.fixture
def crashing() -> set[int]:
    """Numbers of the commits whose runs crash."""
    return {CRASHING}


@pytest.fixture
def started(repository, crashing, monkeypatch) -> list[int]:
    """Numbers of the commits that were run, in order."""
    numbers: list[int] = []

    def side(arm) -> tuple[PlannedArm, Side]:
        commit = commit_of(repository, arm.git, "arm")
        number = int(git(repository, "show", f"{commit}:number"))
        sent = int(git(repository, "show", f"{commit}:sent"))

        def launch(resolved, folder, **_):
            numbers.append(number)
            folder.write_environment({"cpu_name": "Example CPU", "cpu_count": 2})
            slower = 10.0 * (1.0 if sent == 100 else 1.5) + 0.001 * len(numbers)
            with_steps(resolved, folder, slower, sent)
            return with_end(folder, "crashed" if number in crashing else "ok", reason="")

        planned = PlannedArm(arm.name, arm.described(), commit, None, "2.13.0", "3.11")
        return planned, Side(launch, lambda _: commit)

    def prepared(sweep, _store):
        arms = [side(arm) for arm in sweep.arms]
        whole = replace(sweep.whole, arms=tuple(arm for arm, _ in arms))
        return replace(sweep, whole=whole, sides={arm.name: made for arm, made in arms})

    monkeypatch.setattr(ChosenSweep, "prepared", prepared)
    return numbers


@pytest.fixture
def bisect(repository, tmp_path, capsys):
    sweep = tmp_path / "bisected.yaml"
    sweep.write_text(SWEEP)

    def run(*arguments: str):
        command = ["bisect", str(sweep), "--repo", str(repository), *arguments]
        code = run_command_line([*command, "--results", str(tmp_path / "results"), "--json"])
        captured = capsys.readouterr()
        return code, json.loads(captured.out) if captured.out else captured.err

    return run


def test_bytes_take_one_run_per_commit_and_a_commit_that_crashes_is_gone_around(bisect, started):
    asked = ("--good", "c0", "--bad", "c11", "--metric", "wire_bytes")
    code, found = bisect(*asked)
    assert code == 0
    assert [one["subject"] for one in found["candidates"]] == ["change 7"]
    assert found["change"] == "regressed, 100 to 104 (+4)"
    assert len(started) == len(set(started)) <= 7
    assert CRASHING in started
    assert any("crashed" in why for why in found["skipped"].values())
    # The same command goes on from what has run.
    before = len(started)
    assert bisect(*asked) == (0, found)
    assert len(started) == before


def test_times_take_blocks_of_both_commits(bisect, started):
    code, found = bisect("--good", "c5", "--bad", "c9", "--metric", "step_time")
    assert code == 0
    assert [one["subject"] for one in found["candidates"]] == ["change 7"]
    assert started.count(9) == 8  # blocks of good and bad, in turn
    assert started.count(5) >= 8


def test_where_only_a_commit_that_cannot_run_is_left_both_are_candidates(bisect, started, crashing):
    crashing.add(6)
    code, found = bisect("--good", "c5", "--bad", "c7", "--metric", "wire_bytes")
    assert code == 3
    assert [one["subject"] for one in found["candidates"]] == ["change 6", "change 7"]


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("--good", "c0", "--bad", "c5", "--metric", "wire_bytes"), 3, "is not different from c0"),
        (("--good", "c9", "--bad", "c5", "--metric", "wire_bytes"), 2, "is no ancestor of --bad"),
        (("--good", "c5", "--bad", "c5", "--metric", "wire_bytes"), 2, "name two commits"),
        (("--good", "nothing", "--metric", "wire_bytes"), 2, "git knows no commit 'nothing'"),
        (("--good", "c0", "--metric", "wire_byte"), 2, "--metric: expected one of"),
    ],
)
def test_what_cannot_be_searched_is_refused(bisect, started, arguments, code, message):
    found, text = bisect(*arguments)
    assert found == code
    assert message in text["error"]


@pytest.mark.parametrize("after", [0, 3])
def test_a_folder_that_another_runner_uses_is_no_fault_of_a_commit(
    bisect, started, monkeypatch, after
):
    calls: list[int] = []
    run_missing = bisecting.running.run_missing

    def planned(*arguments):
        calls.append(1)
        if len(calls) > after:
            raise StoreLockedError("another runner is using results")
        return run_missing(*arguments)

    monkeypatch.setattr(bisecting.running, "run_missing", planned)
    code, text = bisect("--good", "c0", "--bad", "c11", "--metric", "wire_bytes")
    assert code == 2
    assert text["error"] == "another runner is using results"


def test_of_two_changes_the_one_that_crosses_the_middle_is_found(repository, bisect, started):
    git(repository, "checkout", "-q", "-B", "twice", "c2")
    for number, sent in ((30, 101), (31, 101), (32, 109), (33, 109)):
        (repository / "number").write_text(str(number))
        (repository / "sent").write_text(str(sent))
        git(repository, "commit", "-qam", f"twice {number}")
    code, found = bisect("--good", "c2", "--bad", "twice", "--metric", "wire_bytes")
    assert code == 0
    assert [one["subject"] for one in found["candidates"]] == ["twice 32"]


def test_of_a_merge_what_it_brought_in_is_searched(repository, bisect, started):
    git(repository, "checkout", "-q", "-b", "side", "c2")
    for number in (20, 21, 22):
        (repository / "number").write_text(str(number))
        (repository / "sent").write_text("100" if number < 21 else "104")
        git(repository, "commit", "-qam", f"side {number}")
    git(repository, "checkout", "-q", "-B", "merged", "c3")
    git(repository, "merge", "-q", "-X", "theirs", "-m", "a merge", "side")
    code, found = bisect("--good", "c2", "--bad", "merged", "--metric", "wire_bytes")
    assert code == 0
    assert [one["subject"] for one in found["candidates"]] == ["side 21"]
