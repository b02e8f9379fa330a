"""What pyproject.toml promises is kept: required packages are used, and exemptions are needed."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

import pytest
from optional import CORES, PACKAGES, PROGRAMS, missing, take_surroundings

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
IMPORTED_AS = {"ruamel.yaml": "ruamel"}


def imported_packages() -> set[str]:
    found = set()
    for package in ("bench", "mfsdp_core", "reports", "sweeps"):
        for source in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(source.read_text())):
                if isinstance(node, ast.Import):
                    found |= {name.name.partition(".")[0] for name in node.names}
                elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                    found.add(node.module.partition(".")[0])
    return found


def test_every_required_package_is_imported() -> None:
    required = [re.split("[<>=]", one)[0] for one in PROJECT["project"]["dependencies"]]
    unused = {IMPORTED_AS.get(name, name) for name in required} - imported_packages()
    assert not unused


def test_no_contract_ignores_exemptions_that_nothing_needs() -> None:
    """import-linter fails on an exemption without a match unless told otherwise."""
    contracts = PROJECT["tool"]["importlinter"]["contracts"]
    assert not [one["id"] for one in contracts if "unmatched_ignore_imports_alerting" in one]


def test_one_module_of_the_core_knows_cuda() -> None:
    """Streams, events and memory of a device go through `mfsdp_core.streams`."""
    knows = [
        str(file.relative_to(ROOT))
        for file in (ROOT / "mfsdp_core").rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if (isinstance(node, ast.Attribute) and node.attr in {"cuda", "get_device_module"})
        and isinstance(node.value, ast.Name)
        and node.value.id == "torch"
    ]
    assert set(knows) == {"mfsdp_core/streams.py"}


ASKING = {"importorskip", "skipif", "find_spec", "which"}


def test_only_one_file_of_tests_asks_what_a_machine_lacks() -> None:
    """Elsewhere `ABSENT` would not be heeded: tests say `@pytest.mark.needs`."""
    found = {
        f"{file.relative_to(ROOT)}:{node.lineno}"
        for file in (ROOT / "tests").rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if (isinstance(node, ast.Attribute) and node.attr in ASKING)
        or (isinstance(node, ast.alias) and node.name in ASKING)
    }
    assert {place.partition(":")[0] for place in found} == {"tests/optional.py"}, found


def test_absent_all_answers_as_a_machine_that_lacks_everything(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ABSENT", "all")
    for name in (*PROGRAMS, *PACKAGES, CORES):
        assert missing(name) == f"needs {name}, and ABSENT names it"
    variables = {"HOME": "/root", "LANG": "de_DE.UTF-8"}
    take_surroundings(variables)
    assert (variables["HOME"], variables["LC_ALL"]) == ("/nonexistent", "C")
    monkeypatch.setenv("ABSENT", "sshd slrum")
    with pytest.raises(
        pytest.UsageError, match=r"expected all or some of .*'slurm'.*, found slrum"
    ):
        missing("sshd")


def in_the_encoding_of_the_locale(call: ast.Call) -> bool:
    named = {keyword.arg for keyword in call.keywords}
    if not isinstance(call.func, ast.Attribute) or "encoding" in named:
        return False
    match call.func.attr, call.args:
        case "read_text" | "write_text", _:
            return True
        case "open", [ast.Constant(str(mode))]:
            return "b" not in mode
    return False


def test_no_file_is_read_in_the_encoding_of_the_locale() -> None:
    """What one machine writes another one reads; /dev/null is the same everywhere."""
    found = [
        f"{file.relative_to(ROOT)}:{node.lineno}"
        for package in ("bench", "mfsdp_core", "reports", "sweeps")
        for file in (ROOT / package).rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Call) and in_the_encoding_of_the_locale(node)
        if "devnull" not in ast.unparse(node)
    ]
    assert found == []
