"""Modules that promise to be light load in an interpreter that has no torch at all."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
#: What starts a rank loads before the rank is tied to its parent.
NUMPY_FREE = ("bench/launch", "bench/resolve", "bench/store")
TORCH_FREE = (
    "bench/__init__.py",
    "bench/spec",
    "bench/record.py",
    "bench/workload.py",
    "bench/verdict.py",
    "bench/known_failures.py",
    "bench/errors.py",
    "bench/derive",
    "bench/doctor/__init__.py",
    "sweeps",
    "reports",
    "mfsdp_core/__init__.py",
    "mfsdp_core/plan",
)

IMPORT_WITHOUT = """
import importlib, json, sys

blocked, modules = json.loads(sys.argv[1]), json.loads(sys.argv[2])
asked_by = []

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in blocked:
            asked_by.append(importing)
            raise ImportError(f"{name} is blocked here")

sys.meta_path.insert(0, Blocker())
for importing in modules:
    try:
        importlib.import_module(importing)
    except ImportError:
        asked_by.append(importing)
print(json.dumps(asked_by))
"""


def modules_under(path: str) -> list[str]:
    """Dotted names of the module `path`, or of every module in the folder `path`."""
    start = ROOT / path
    sources = [start] if start.suffix else sorted(start.rglob("*.py"))
    names = [".".join(source.relative_to(ROOT).with_suffix("").parts) for source in sources]
    assert names
    return [name.removesuffix(".__init__") for name in names]


def asking(blocked: list[str], modules: list[str]) -> set[str]:
    """The modules that ask for what is blocked when they are imported."""
    result = subprocess.run(
        [sys.executable, "-c", IMPORT_WITHOUT, json.dumps(blocked), json.dumps(modules)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return set(json.loads(result.stdout.splitlines()[-1]))


@pytest.mark.parametrize(
    ("blocked", "paths"), [(["torch"], TORCH_FREE), (["torch", "numpy"], NUMPY_FREE)]
)
def test_light_modules_import_where_it_is_missing(
    blocked: list[str], paths: tuple[str, ...]
) -> None:
    assert asking(blocked, [name for path in paths for name in modules_under(path)]) == set()


def test_the_blocker_does_block() -> None:
    assert asking(["torch"], ["mfsdp_core.plan", "mfsdp_core.api"]) == {"mfsdp_core.api"}
