"""How light the command line is, and what a shell completes: nothing more is printed."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import sweeps
from bench.fit.trace import trace

VERBS = ["plan", "fit", "run", "status", "compare", "gate", "baseline"]
VERBS += ["report", "export", "nccl", "doctor", "schema"]
HEAVY = ["torch", "numpy", "pandas", "scipy", "matplotlib", "ruamel", "psutil", "bench.spec"]

LOADED_BY = """
import sys
from bench.cli.main import run_command_line
for words, heavy in {commands!r}:
    code = run_command_line(words)
    loaded = sorted(set(heavy) & set(sys.modules))
    if loaded or code:
        sys.exit(f"{{words}}: exit code {{code}}, loaded {{loaded}}")
"""
# Raises at the first attempt to start a process, whatever library makes it.
NO_PROCESS = """
import sys
def refuse(event, _):
    if event in {"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.system",
                 "os.exec", "os.spawn"}:
        raise SystemExit(f"started a process: {event}")
sys.addaudithook(refuse)
from bench.cli.main import run_command_line
sys.exit(run_command_line(sys.argv[1:]))
"""


def python(cli, program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program, *arguments],
        cwd=cli.folder,
        env=cli.environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )


def test_help_loads_nothing_heavy_and_verbs_that_measure_nothing_load_no_torch(cli):
    commands = [(["--help"], HEAVY), *(([verb, "--help"], HEAVY) for verb in VERBS)]
    measuring = ["torch", "pandas", "scipy", "matplotlib"]
    commands += [(words, measuring) for words in (["schema"], ["plan", "quickstart"])]
    done = python(cli, LOADED_BY.format(commands=commands))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("Usage: mfsdp-bench") == 1 + len(VERBS)


def test_plan_of_a_shipped_sweep_traces_nothing(in_process, monkeypatch):
    """A trace takes seconds of processor time for each cell: 140 s for pr5462_allocators."""
    traced = []
    monkeypatch.setattr("bench.fit.prediction.trace", lambda one: traced.append(one) or trace(one))
    on_gpus = ("--device", "H100", "--gpus", "8")
    shipped = sorted(path.stem for path in Path(sweeps.__path__[0]).glob("*.yaml"))
    codes = {name: in_process("plan", name, *on_gpus)[0] for name in shipped}
    assert set(codes.values()) == {0}, codes
    assert traced == []
    assert in_process("fit", "quickstart", "--only", "engine.name=ddp")[0] == 0
    assert traced


@pytest.mark.parametrize("verb", [*VERBS, "validate", "baseline save"])
def test_the_help_of_a_verb_has_an_example_and_no_names_of_types(in_process, verb):
    _, out, _ = in_process(*verb.split(), "--help")
    assert verb == "baseline" or "Examples:\n    mfsdp-bench " + verb in out
    assert "[[" not in out.partition("\n")[0]
    options = out.partition("\nOptions:\n")[2]
    assert not re.findall("<[a-z]+>", options)


@pytest.mark.parametrize("option", ["--version", "-V"])
def test_the_version_names_the_tool_its_commit_python_and_torch(in_process, option):
    code, out, _ = in_process(option)
    assert code == 0
    assert re.fullmatch(
        r"mfsdp-bench \d\S* \(commit [0-9a-f]{12}(, with uncommitted changes)?\),"
        r" Python \d\S*, torch \d\S*\n",
        out,
    )


@pytest.mark.parametrize("also", ["", "import os; os.system('true'); "])
def test_plan_starts_no_process_which_would_be_noticed(cli, also):
    done = python(cli, NO_PROCESS.replace("sys.exit(", f"{also}sys.exit("), "plan", "pr3067_dtypes")
    noticed = bool(also)
    assert ("started a process" in done.stderr) is noticed
    assert (done.returncode == 0) is not noticed
    assert ("hfsdp-bf16-ub_on" in done.stdout) is not noticed


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("ga", ["gate"]),
        ("baseline pro", ["promote"]),
        ("compare --format m", ["md"]),
    ],
)
def test_completes(in_process, monkeypatch, line, expected):
    monkeypatch.setenv("_MFSDP_BENCH_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", f"mfsdp-bench {line}")
    monkeypatch.setenv("COMP_CWORD", str(len(line.split(" "))))
    code, out, err = in_process()
    assert (code, out.split(), err) == (0, expected, "")
