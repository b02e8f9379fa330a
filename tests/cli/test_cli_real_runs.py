"""Sweeps with real ranks through the real command line: report, resume, interrupt."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest

pytestmark = [pytest.mark.processes, pytest.mark.timeout(200)]

GOOD = {"ok", "unstable"}  # on a busy machine a short run may find no steady state
SEEDS = "matrix: {product: {engine.name: [single], train.seed: [1, 2, 3]}}\n"


def test_a_sweep_from_file_to_report(cli, fast, in_process):
    path = cli.sweep(fast + "matrix: {product: {engine.name: [mfsdp], launch.ranks: [2]}}\n")
    done = cli.run("run", path, "--report")
    ((cell, state),) = cli.runs()
    assert state in GOOD, done.stderr
    assert done.returncode == (0 if state == "ok" else 3), done.stderr
    # The table of results comes with and without a report, the report's path is the last line.
    assert re.search(rf"\W {cell} +1 {state} .*MiB", done.stdout), done.stdout
    assert "<svg" in Path(done.stdout.splitlines()[-1]).read_text()

    code, out, err = in_process("history", "loss", "--append", "kept.jsonl")
    assert code == 0, err
    assert re.search(rf"{cell} +1 point, 1 start ", out), out
    assert "<svg" in Path(out.splitlines()[-1]).read_text()

    code, out, err = in_process("run", path)
    assert code == done.returncode
    assert "(0 now, 1 before)" in err
    assert f" {cell} " in out


# Daily of scripted ranks: tests/run/faults; of a stand-in: outcomes_of_runs.py.
@pytest.mark.nightly
@pytest.mark.needs("two_cores")
def test_packed_runs_keep_to_cores_of_their_own_and_end_together(cli, fast):
    endless = SEEDS.replace("train.seed", "train.steps: [1000000], train.seed")
    runner = cli.start("run", cli.sweep(f"{fast}pack: true\n{endless}"))
    cli.wait_for_steps(runs=2)
    bound = {tuple(process.cpu_affinity()) for process in cli.alive()}
    runner.send_signal(signal.SIGINT)
    _, err = runner.communicate(timeout=60)
    assert runner.returncode == 130, err
    assert {len(cores) for cores in bound} == {1}
    assert len(bound) == len(cli.runs()), "each run has a core of its own"
    assert cli.alive() == []
    assert {state for _, state in cli.runs()} == {"interrupted"}
    assert cli.run("status", "fast").stdout.count("interrupted (packed)") == len(bound)
