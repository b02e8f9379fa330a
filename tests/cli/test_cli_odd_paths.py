"""Paths and streams that cannot be used end with a message, not with an internal error."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench.cli.main import run_command_line

LONG = "a" * 300
USAGE = 2


@pytest.mark.parametrize(
    "arguments",
    [
        ["plan", LONG],
        ["report", LONG, "--results", "{results}"],
        ["report", "--results", "{results}", "--out", LONG],
        ["run", "quickstart", "--results", "/proc/no_such_folder"],
        ["plan", "quickstart", "--set", "launch.hang_seconds=1e308"],
    ],
)
def test_a_path_or_limit_that_cannot_be_used_is_a_usage_error(arguments, tmp_path, capsys):
    results = tmp_path / "results"
    (results / "sweeps" / "one").mkdir(parents=True)
    (results / "runs").mkdir()
    (results / "SCHEMA").write_text("1\n")
    code = run_command_line([part.format(results=results) for part in arguments])
    printed = capsys.readouterr().err
    assert code == USAGE, printed
    assert "Traceback" not in printed


def test_a_closed_standard_output_is_no_internal_error():
    program = "import os, sys; os.close(1); os.execv(sys.executable, sys.argv[1:])"
    verb = [sys.executable, "-m", "bench", "schema"]
    ended = subprocess.run(
        [sys.executable, "-c", program, *verb],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        timeout=60,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
