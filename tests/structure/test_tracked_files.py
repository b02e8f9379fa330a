"""Rules for every file of the repository: size, names, nothing of one machine or half done."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("bench", "mfsdp_core", "sweeps", "reports")
MAX_LINES = 500
VAGUE_NAMES = {"utils", "util", "helpers", "helper", "common", "misc"}
# Assembled, so that this file does not hold what it looks for.
UNFINISHED = re.compile("|".join(("TO" + "DO", "FIX" + "ME", "X" + "XX", "HA" + "CK")))
PACKAGE_INDEX = re.compile(r"index-url[\s=]+https?:" + r"|://[\w.-]*(?:pypi|python" + r"hosted)\b")


def tracked() -> list[Path]:
    """Every file that is committed or about to be: ignored ones are no part of the repository."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listing = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    if listing.returncode != 0:
        pytest.skip(f"not a git checkout: {listing.stderr.strip()}")
    return [ROOT / line for line in listing.stdout.splitlines() if (ROOT / line).is_file()]


def text_of(path: Path) -> str:
    """The file's text; undecodable bytes are replaced, for patterns in ASCII only."""
    return path.read_text(encoding="utf-8", errors="replace")


def findings(pattern: re.Pattern[str]) -> list[str]:
    return [
        f"{path.relative_to(ROOT)}:{number}"
        for path in tracked()
        for number, line in enumerate(text_of(path).splitlines(), 1)
        if pattern.search(line)
    ]


def test_no_source_file_is_longer_than_500_lines() -> None:
    lengths = {p: len(text_of(p).splitlines()) for p in tracked() if p.suffix == ".py"}
    assert [f"{p}: {n}" for p, n in lengths.items() if n > MAX_LINES] == []


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
