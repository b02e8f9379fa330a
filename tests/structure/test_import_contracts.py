"""Who may import whom, as written in pyproject.toml, holds for the tree as it is."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
#: What the results of the core are compared with, as far as no layout of its own is needed.
ORACLES = ("quantised_tensors", "transformer_engine", "models", "reference", "rounding", "ranks")
PACKAGES = ("bench", "mfsdp_core", "sweeps", "reports")


def lint_imports(folder: Path) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).parent / "lint-imports"), "--no-cache"]
    wide = {**os.environ, "COLUMNS": "200"}
    return subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=200, check=False, env=wide
    )


def test_every_contract_is_kept() -> None:
    result = lint_imports(ROOT)
    assert result.returncode == 0, result.stdout + result.stderr


#: A forbidden import, and the contract that it breaks.
FORBIDDEN = [
    ("mfsdp_core/plan/strategy.py", "import bench", "mfsdp_core imports nothing of ours"),
    ("mfsdp_core/plan/strategy.py", "import mfsdp_core.api", "the rooms of mfsdp_core"),
    ("mfsdp_core/plan/strategy.py", "import torch", "never import torch"),
    ("bench/spec/run.py", "import bench.store", "bench, one run"),
    ("bench/loop.py", "import mfsdp_core", "bench imports mfsdp_core only"),
    ("bench/loop.py", "import sweeps", "bench imports neither sweeps nor reports"),
    ("sweeps/matrix.py", "import bench.engines", "sweeps imports of bench only"),
    ("reports/build.py", "import bench.resolve", "reports imports of bench only"),
    ("reports/build.py", "import torch", "never import torch"),
]


@pytest.fixture(scope="module")
def report_of_all_broken(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What the linter says of one copy of the sources that has every forbidden import."""
    folder = tmp_path_factory.mktemp("sources")
    copy_of_sources(folder)
    for module, statement, _ in FORBIDDEN:
        source = folder / module
        source.write_text(source.read_text() + f"\n{statement}\n")
    result = lint_imports(folder)
    assert result.returncode == 1, result.stdout + result.stderr
    return result.stdout


@pytest.mark.parametrize(("module", "statement", "contract"), FORBIDDEN)
def test_a_forbidden_import_breaks_its_contract(
    report_of_all_broken: str, module: str, statement: str, contract: str
) -> None:
    broken = [line for line in report_of_all_broken.splitlines() if "BROKEN" in line]
    assert any(contract in line for line in broken), report_of_all_broken
    importer = module.removesuffix(".py").replace("/", ".")
    imported = statement.removeprefix("import ")
    assert f"{importer} -> {imported} (l." in report_of_all_broken, report_of_all_broken


def test_every_package_of_the_project_is_under_contract() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert settings["tool"]["importlinter"]["root_packages"] == list(PACKAGES)
    # Scripts for developers and examples are typed as well, though no package imports them.
    assert settings["tool"]["mypy"]["packages"] == [*PACKAGES, "tools", "examples"]


def test_what_the_core_is_judged_by_does_not_import_it() -> None:
    oracle = ROOT / "tests" / "core" / "oracle"
    files = [*(ROOT / "bench" / "testing").glob("*.py"), *(oracle / f"{one}.py" for one in ORACLES)]
    core = re.compile(r"^\s*(?:from|import) mfsdp_core\b", re.MULTILINE)
    assert [file.name for file in files if core.search(file.read_text())] == []


def copy_of_sources(folder: Path) -> None:
    """Sources alone, so that a contract can be broken without touching the tree."""
    (folder / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text())
    for package in PACKAGES:
        for source in (ROOT / package).rglob("*.py"):
            target = folder / source.relative_to(ROOT)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(source.read_text())
