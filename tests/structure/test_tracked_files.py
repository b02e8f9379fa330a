"""Rules for every file of the repository: size, names, nothing of one machine or half done."""

from __future__ import annotations

import re
import tempfile
from collections import Counter
from pathlib import Path

import pytest

from tracked import ROOT, text_of, tracked

PACKAGES = ("bench", "mfsdp_core", "sweeps", "reports")
VAGUE_NAMES = {"utils", "util", "helpers", "helper", "common", "misc"}
# Assembled, so that this file does not hold what it looks for.
UNFINISHED = re.compile("|".join(("TO" + "DO", "FIX" + "ME", "X" + "XX", "HA" + "CK")))
PACKAGE_INDEX = re.compile(r"index-url[\s=]+https?:" + r"|://[\w.-]*(?:pypi|python" + r"hosted)\b")


def findings(pattern: re.Pattern[str]) -> list[str]:
    return [
        f"{path.relative_to(ROOT)}:{number}"
        for path in tracked()
        for number, line in enumerate(text_of(path).splitlines(), 1)
        if pattern.search(line)
    ]


def test_no_module_has_a_name_that_says_nothing() -> None:
    assert [p for p in tracked() if p.suffix == ".py" and p.stem in VAGUE_NAMES] == []


def test_no_file_holds_a_path_of_the_machine_it_was_written_on() -> None:
    # Folders that every machine has are in examples, and may be where this one was cloned.
    everywhere = {Path("/"), Path("/tmp"), Path(tempfile.gettempdir()).resolve()}
    homes = {ROOT.parent, ROOT, Path.home()} - everywhere
    places = [re.escape(str(place)) + "/" for place in homes]
    assert findings(re.compile("|".join([*places, r"(?<![\w.])/(?:home|Users)/\w+"]))) == []


@pytest.mark.parametrize(
    "pattern", [PACKAGE_INDEX, UNFINISHED, re.compile(r"^(?:<{7}|>{7}) ")],
    ids=["a package index", "unfinished", "a conflict"],
)  # fmt: skip
def test_no_file_has_what_is_half_done_or_of_one_place(pattern: re.Pattern[str]) -> None:
    assert findings(pattern) == []


def test_test_files_have_unique_names_and_no_package_among_them() -> None:
    tests = [p for p in tracked() if p.is_relative_to(ROOT / "tests")]
    assert [p for p in tests if p.name == "__init__.py"] == []
    names = Counter(p.name for p in tests if p.name.startswith("test_"))
    assert [name for name, count in names.items() if count > 1] == []
    assert not {p.name for p in (ROOT / "tests").iterdir()} & set(PACKAGES)


def test_readmes_lead_to_the_decisions_and_name_the_two_commands_before_any_other() -> None:
    for package in PACKAGES:
        assert "](../docs/decisions/README.md)" in text_of(ROOT / package / "README.md")
    lines = [line for line in text_of(ROOT / "README.md").splitlines() if line.startswith("make ")]
    assert [line.split("#")[0].strip() for line in lines[:2]] == ["make demo", "make test"]


def test_the_continuous_integration_script_is_executable() -> None:
    assert (ROOT / ".ci" / "run").stat().st_mode & 0o111
