"""The kill matrix: which statements a patch changes, and what the table says of the answers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.validate.bugs import BUG_BY_ID
from bench.validate.patched_core import CORE, copy_of_core
from tools.kill_matrix import (
    answers,
    changed_statements,
    changes,
    is_in_functions,
    patched,
    table,
)

OLD = """import os

def divided(
    total,
    ranks,
):
    if (
        ranks
        < 1
    ):
        return 0
    return (
        total
        / ranks
    )
"""


@pytest.mark.parametrize(
    ("what", "instead", "lines"),
    [
        ("        < 1\n", "        < 2\n", {7, 8, 9, 10}),
        ("        / ranks\n", "        * ranks\n", {12, 13, 14, 15}),
        ("        return 0\n", "        ranks = 2\n        return 0\n", {7, 8, 9, 10, 11}),
        ("import os\n", "import sys\n", {1}),
    ],
)
def test_a_change_is_on_every_line_of_its_statement(
    what: str, instead: str, lines: set[int]
) -> None:
    assert changed_statements(OLD, OLD.replace(what, instead)) == lines


def test_what_an_import_executes_is_in_no_function() -> None:
    assert is_in_functions(OLD, {11})
    assert not is_in_functions(OLD, {1})


def test_patches_of_a_folder_are_asked_about_alone(tmp_path: Path) -> None:
    for number in (1, 2):
        (tmp_path / f"{number}-no.patch").write_text(BUG_BY_ID[f"R{number}"].patch.read_text())
    assert [change.id for change in changes(28, 40, tmp_path)] == ["1-no", "2-no"]


def test_a_patch_of_several_files_is_a_change_of_all_of_them(tmp_path: Path) -> None:
    change = patched(BUG_BY_ID["R6"])
    core = copy_of_core(tmp_path)
    change.write(core)
    differing = {
        str(file.relative_to(core))
        for file in core.rglob("*.py")
        if file.read_text() != (CORE / file.relative_to(core)).read_text()
    }
    assert set(change.lines) == differing
    assert len(differing) == 3
    for file, lines in change.lines.items():
        assert change.is_on({file: {max(lines)}})
        assert not change.is_on({file: {0}})


def test_the_table_counts_changes_that_every_detector_was_asked_about(tmp_path: Path) -> None:
    said = [("R1", "cases", 3, "a"), ("R1", "tests", 2, ""), ("R2", "cases", 0, "")]
    lines = [
        {"change": change, "detector": name, "of": of, "outcome": "survived"}
        | ({"outcome": "caught", "case": case} if case else {})
        for change, name, of, case in said
    ]
    (tmp_path / "answers.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
    wanted = [patched(BUG_BY_ID[name]) for name in ("R1", "R2", "R3")]
    told = table(answers(tmp_path), wanted).splitlines()
    assert told[2:5] == [
        "| patches noticed | 1 of 3 | 1 | 0 |",
        "| patches noticed by this one alone |  | 1 | 0 |",
        "| patches that nobody noticed | 0 |  |  |",
    ]
    assert told[-3:] == ["| R1 | `a` | - |", "| R2 | 0 |  |", "| R3 |  |  |"]
