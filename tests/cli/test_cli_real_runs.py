"""Sweeps with real ranks through the real command line: report, resume, interrupt."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.processes

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
