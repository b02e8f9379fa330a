"""Modules that promise to be light load in an interpreter that has no torch at all."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TORCH_FREE = (
    "bench/__init__.py",
    "bench/spec",
    "bench/record.py",
    "bench/workload.py",
    "bench/verdict.py",
    "bench/known_failures.py",
    "bench/errors.py",
    "bench/store",
    "bench/derive",
    "bench/resolve",
    "bench/launch",
    "sweeps",
    "reports",
    "mfsdp_core/__init__.py",
    "mfsdp_core/plan",
)
HEAVY = ("torch", "pandas", "matplotlib", "scipy")

IMPORT_WITHOUT_TORCH = """
import importlib, json, sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "torch":
            raise ImportError("torch is blocked here")

sys.meta_path.insert(0, Blocker())
failures = {}
for name in json.loads(sys.argv[1]):
    try:
        importlib.import_module(name)
    except Exception as error:
        failures[name] = f"{type(error).__name__}: {error}"
print(json.dumps(failures))
"""

LOADED_BY_HELP = """
import json, sys

sys.argv = ["mfsdp-bench", "--help"]
from bench.cli.main import main

try:
    main()
except SystemExit as done:
    assert not done.code, done.code
print(json.dumps(sorted({name.split(".")[0] for name in sys.modules})))
"""


def modules_under(path: str) -> list[str]:
    """Dotted names of the module `path`, or of every module in the folder `path`."""
    start = ROOT / path
    sources = [start] if start.suffix else sorted(start.rglob("*.py"))
    names = [".".join(source.relative_to(ROOT).with_suffix("").parts) for source in sources]
    return [name.removesuffix(".__init__") for name in names]


def python(code: str, *arguments: str) -> str:
    result = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()[-1]


@pytest.mark.parametrize("path", TORCH_FREE)
def test_light_modules_import_where_torch_is_missing(path: str) -> None:
    modules = modules_under(path)
    assert modules
    assert json.loads(python(IMPORT_WITHOUT_TORCH, json.dumps(modules))) == {}


def test_the_blocker_does_block() -> None:
    failures = json.loads(python(IMPORT_WITHOUT_TORCH, json.dumps(["mfsdp_core.api"])))
    assert "torch is blocked here" in failures["mfsdp_core.api"]


def test_help_of_the_command_line_loads_nothing_heavy() -> None:
    assert not set(json.loads(python(LOADED_BY_HELP))) & set(HEAVY)
