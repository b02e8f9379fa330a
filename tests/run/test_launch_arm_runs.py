"""Arms on real ranks: each runs its own code and proves it; wrong code never becomes a number."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from git_repository import git
from launched_runs import launched
from small_runs import small_run

from bench.derive.blocks import complete_blocks, is_interleaved
from bench.launch.arms import ArmRequest, prepare_arms
from bench.launch.code import RankCode, checkout_root
from bench.plan import Plan
from bench.record import RunRecord, RunStatus
from bench.store import ResultsStore

pytestmark = pytest.mark.processes

ARMS = {"base", "head"}
SWEEP = """\
name: two
base: {engine.name: mfsdp, train.steps: 4}
"""


def copy_of_this_checkout(root: Path) -> Path:
    for package in ("bench", "mfsdp_core", "sweeps", "reports"):
        # With what Python has compiled: files keep their times.
        shutil.copytree(checkout_root() / package, root / package)
    return root


def run_in(root: Path, code: RankCode) -> RunRecord:
    """A run of one rank, on the code of an arm."""
    return launched(root, small_run("single"), code)


def arm_of(root: Path, **request) -> RankCode:
    cells = {"head": {"c": small_run("mfsdp")}}
    return prepare_arms([ArmRequest("head", **request)], cells, root / "arms")[0]


# Every other difference: test_launch_code.py.
def test_a_file_that_changed_after_the_arm_was_prepared_fails_the_run(tmp_path: Path) -> None:
    checkout = copy_of_this_checkout(tmp_path / "copy")
    code = arm_of(tmp_path, checkout=checkout)
    loop = checkout / "bench" / "loop.py"
    loop.write_text(loop.read_text() + "\n# one more line\n")
    record = run_in(tmp_path, code)
    assert (record.status.state, record.status.code_proof) == ("crashed", "mismatch")
    assert "the code of this rank is not that of arm head" in record.status.reason
    assert "bench/loop.py changed" in record.status.reason
    assert record.steps == {}
    assert record.environment["runtime"]["code_proof"]["0"]["problems"]


@pytest.mark.nightly
def test_a_bench_that_lacks_a_setting_runs_with_its_default(tmp_path: Path) -> None:
    checkout = copy_of_this_checkout(tmp_path / "copy")
    spec = checkout / "bench" / "spec" / "run.py"
    lines = spec.read_text().splitlines(keepends=True)
    spec.write_text("".join(line for line in lines if "master_weights:" not in line))
    record = run_in(tmp_path, arm_of(tmp_path, checkout=checkout))
    assert record.status.state in {"ok", "unstable"}, record.status.reason
    assert record.status.code_proof == "proven"
    assert record.resolved.train.master_weights is False


def command_line(results: Path, sweep: Path, arms: list[str], *more: str) -> list[str]:
    command = [sys.executable, "-m", "bench", "run", str(sweep), "--results", str(results)]
    command += ["--interleave", "--repeat", "2", *more]
    return command + [part for arm in arms for part in ("--arm", arm)]


def environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(checkout_root())}


def kill_in_the_second_block(command: list[str], store_root: Path, log: Path) -> None:
    """SIGKILL to the runner as soon as a run of block 1 exists; its ranks die with it."""
    with log.open("w") as stream:
        runner = subprocess.Popen(command, env=environment(), stdout=stream, stderr=stream)
    deadline = time.monotonic() + 200
    try:
        while not any(s.repeat == 1 for s in statuses(store_root)):
            assert runner.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)
    finally:
        runner.send_signal(signal.SIGKILL)
        runner.wait()


def statuses(root: Path) -> list[RunStatus]:
    files = root.glob("runs/*/*/status.json")
    return [RunStatus.model_validate_json(file.read_bytes()) for file in files]


@pytest.mark.nightly
def test_two_arms_prove_different_cores_and_a_killed_sweep_resumes_by_blocks(
    tmp_path: Path,
) -> None:
    project = copy_of_this_checkout(tmp_path / "project")
    (project / ".gitignore").write_text("__pycache__\n")
    git(project, "init", "-q", "-b", "main")
    git(project, "add", ".")
    git(project, "commit", "-q", "-m", "as it is")
    core = project / "mfsdp_core" / "runtime" / "context.py"
    core.write_text(core.read_text() + "\n# one changed line\n")
    (tmp_path / "two.yaml").write_text(SWEEP)
    arms = [f"base=git:main,repo:{project}", f"head=checkout:{project}"]
    command = command_line(tmp_path / "results", tmp_path / "two.yaml", arms)

    kill_in_the_second_block(command, tmp_path / "results", tmp_path / "log")
    store = ResultsStore.open(tmp_path / "results", create=False)
    before = {r.run_id: r.status for r in store.records() if r.status.state in {"ok", "unstable"}}
    assert {(status.repeat, status.arm) for status in before.values()} == {(0, arm) for arm in ARMS}

    done = subprocess.run(
        command, env=environment(), capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode in {0, 3}, done.stderr  # 3: all runs unsteady on a busy machine
    records = list(store.records())
    again = [r.status for r in records if r.run_id not in before]
    assert {(s.repeat, s.attempt) for s in again} == {(1, 1), (1, 2)}
    assert {s.arm for s in again if s.attempt == 2 and s.state in {"ok", "unstable"}} == ARMS

    (blocks,) = complete_blocks(records).values()
    assert [block["base"].status.attempt for block in blocks] == [1, 2]
    assert all(is_interleaved(block) for block in blocks)
    proofs = {
        arm: {
            rank["packages"]["mfsdp_core"]["sha256"]
            for block in blocks
            for rank in block[arm].environment["runtime"]["code_proof"].values()
        }
        for arm in ARMS
    }
    assert len(proofs["base"]) == len(proofs["head"]) == 1
    assert proofs["base"] != proofs["head"]
    assert {block[arm].status.code_proof for block in blocks for arm in block} == {"proven"}
    assert [len(block[arm].environment["runtime"]["code_proof"]) for block in blocks
            for arm in block] == [2] * 4  # fmt: skip
    plan = Plan.from_document(store.read_plan(store.sweeps()[0]))
    assert plan.interleaved
    assert [arm.dirty_hash is None for arm in plan.arms] == [True, False]
    assert str(tmp_path) not in str(plan.to_document()["arms"])
