"""Sweeps with real ranks through the real command line: resume, kill, interrupt, changed code."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

pytestmark = [pytest.mark.processes, pytest.mark.timeout(200)]

GOOD = {"ok", "unstable"}  # on a busy machine a short run may find no steady state
SEEDS = "matrix: {product: {engine.name: [single], train.seed: [1, 2, 3]}}\n"
SHORT_AND_ENDLESS = """\
matrix:
  product:
    engine:
      - {label: short, engine.name: single}
      - {label: endless, engine.name: single, train.steps: 1000000}
"""


def wait_for(condition: Callable[[], bool], what: str, seconds: float = 90.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited {seconds} s for {what}"
        time.sleep(0.05)


def steps_written(folder: Path) -> int:
    files = folder.glob("results/runs/*/*/steps.node*.jsonl")
    return sum(path.read_bytes().count(b"\n") for path in files)


def finish(process: subprocess.Popen[str]) -> tuple[int, str]:
    _, err = process.communicate(timeout=60)
    return process.returncode, err


def test_a_sweep_from_file_to_report(cli, fast):
    path = cli.sweep(
        fast + "matrix:\n  product:\n    what:\n"
        "      - {label: good, engine.name: mfsdp, launch.ranks: 2}\n"
        "      - {label: bad, engine.name: single, train: {lr: 1.0e+30, clip_norm: null}}\n"
    )
    done = cli.run("run", path, "--report")
    assert done.returncode == 3, done.stderr
    states = dict(cli.runs())
    assert states["good"] in GOOD
    assert states["bad"] == "nan"
    assert "bad (repeat 0): nan: " in done.stderr
    # The table of results comes with and without a report, the report's path is the last line.
    for row in (rf"\W good +1 {states['good']} .*MiB", r"! bad +1 nan +- +- +- +-"):
        assert re.search(row, done.stdout), done.stdout
    assert "<svg" in Path(done.stdout.splitlines()[-1]).read_text()

    history = cli.run("history", "loss", "--append", "kept.jsonl")
    assert history.returncode == 0, history.stderr
    assert re.search(r"good +1 point, 1 start ", history.stdout), history.stdout
    assert "<svg" in Path(history.stdout.splitlines()[-1]).read_text()

    again = cli.run("run", path, "--only", "what=good")
    assert again.returncode == (0 if states["good"] == "ok" else 3)
    assert "(0 now, 1 before)" in again.stderr
    assert " good " in again.stdout
    assert " bad " not in again.stdout
    assert len(cli.runs()) == 2


# Twice: tests/run/faults/test_faults.py; in test_cli_outcomes.py with a run that is stood in for.
def test_ctrl_c_ends_every_rank_and_keeps_what_was_finished(cli, fast):
    runner = cli.start("run", cli.sweep(fast + SHORT_AND_ENDLESS))
    wait_for(lambda: steps_written(cli.folder) > 12, "a step of the endless run")
    assert cli.ranks_alive() != []
    runner.send_signal(signal.SIGINT)
    code, err = finish(runner)
    assert code == 130, err
    assert cli.ranks_alive() == []
    finished, interrupted = cli.runs()
    assert finished[1] in GOOD
    assert interrupted == ("endless", "interrupted")


@pytest.mark.nightly
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two runs need two cores")
def test_packed_runs_keep_to_cores_of_their_own_and_end_together(cli, fast):
    endless = SEEDS.replace("train.seed", "train.steps: [1000000], train.seed")
    path = cli.sweep(f"{fast}pack: true\n{endless}")
    runner = cli.start("run", path)

    def steps() -> int:
        return len(list(cli.folder.glob("results/runs/*/*/steps.node*.jsonl")))

    wait_for(lambda: steps() >= 2 and steps() == len(cli.runs()), "steps of two runs")
    bound = {tuple(psutil.Process(pid).cpu_affinity()) for pid in cli.ranks_alive()}
    runner.send_signal(signal.SIGINT)
    code, err = finish(runner)
    assert code == 130, err
    assert {len(cores) for cores in bound} == {1}
    assert len(bound) == len(cli.runs()), "each run has a core of its own"
    assert cli.ranks_alive() == []
    assert {state for _, state in cli.runs()} == {"interrupted"}
    assert cli.run("status", "fast").stdout.count("interrupted (packed)") == len(bound)


@pytest.mark.nightly
def test_a_changed_line_of_the_core_runs_its_cells_again_and_no_others(cli, fast, tmp_path):
    copy = tmp_path / "copy"
    for package in ("bench", "mfsdp_core", "sweeps", "reports"):
        shutil.copytree(
            cli.checkout / package, copy / package, ignore=shutil.ignore_patterns("__pycache__")
        )
    cli.checkout = copy
    path = cli.sweep(fast + "matrix: {product: {engine.name: [single, mfsdp]}}\n")
    cli.run("run", path)
    assert [cell for cell, _ in cli.runs()] == ["single", "mfsdp"]
    assert "(0 now, 2 before)" in cli.run("run", path).stderr

    with (copy / "mfsdp_core" / "errors.py").open("a") as source:
        source.write("\n# a changed line\n")
    status = cli.run("status", "fast").stdout
    assert "(code changed)" in status
    done = cli.run("run", path)
    assert "1 run to do, 1 done before" in done.stderr
    assert [cell for cell, _ in cli.runs()] == ["single", "mfsdp", "mfsdp"]
    assert all(state in GOOD for _, state in cli.runs())
