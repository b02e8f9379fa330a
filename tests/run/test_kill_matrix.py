"""The kill matrix: which statements a change is on, who is asked, and what the table says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.testing.workers import ForkServer
from bench.validate.matrix import cases
from tools.bug_in_a_copy import BUG_BY_ID, CORE
from tools.kill_matrix import (
    Change,
    answers,
    changed_statements,
    is_in_functions,
    of_patch,
    on_tests,
    table,
    traced_cases,
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


def test_a_patch_of_several_files_is_a_change_of_all_of_them() -> None:
    change = of_patch(BUG_BY_ID["R6"])
    with change.core() as folder:
        core = folder / "mfsdp_core"
        differing = {
            str(file.relative_to(core))
            for file in core.rglob("*.py")
            if file.read_text() != (CORE / file.relative_to(core)).read_text()
        }
    assert set(change.lines) == differing
    assert len(differing) == 3
    for file, lines in change.lines.items():
        assert change.executing({"a": {file: [max(lines)]}, "b": {file: [0]}}) == ["a"]


def test_a_change_meets_what_executes_it_every_family_and_file_in_turn() -> None:
    file, other = "plan/layout.py", "wrapper.py"
    source = (CORE / file).read_text()
    change = Change.of("m", False, {file: source.replace("return ", "return not ", 1)})
    assert not change.is_imported
    (lines,) = change.lines.values()
    own, near = {file: [max(lines)]}, {file: [max(lines) + 10_000]}
    known = {
        "tests/a.py::f[1]": own | {other: [1]},
        "tests/a.py::f[2]": own | {other: [1, 2]},
        "tests/a.py::g": own | {other: [1, 2, 3]},
        "tests/b.py::h": own | {other: [1, 2, 3, 4]},
        "tests/b.py::i": near,
        "tests/c.py::j": {other: [1]},
    }
    names = [one.partition("::")[2] for one in change.executing(known)]
    assert names == ["f[1]", "h", "g", "f[2]"]


@pytest.mark.processes
def test_lines_that_the_ranks_of_a_case_execute_are_noted(fork_server: ForkServer) -> None:
    few = [case for case in cases("mfsdp", full=False) if case.ranks == 1][:1]
    ((name, lines),) = traced_cases(fork_server, few)
    assert name == few[0].id
    buffers, nobody = "runtime/gradient_buffers.py", "comm/symmetric.py"
    assert is_in_functions((CORE / buffers).read_text(), set(lines[buffers]))
    assert not is_in_functions((CORE / nobody).read_text(), set(lines.get(nobody, ())))


@pytest.mark.nightly
@pytest.mark.processes
def test_a_test_of_the_core_notices_a_patch_and_nothing_else() -> None:
    ids = ["tests/core/conformance/test_plans.py::test_units_are_gathered_ahead_in_order"]
    first_failure = on_tests()
    with of_patch(BUG_BY_ID["R6"]).core() as folder:
        found = first_failure(folder, ids)
        assert found["case"] == ids[0]
    # Those read documents and tools of the checkout.
    ids += ["tests/core/test_guide.py", "tests/core/test_host_overhead.py"]
    with Change.of("none", False, {}).core() as folder:
        assert first_failure(folder, ids) == {}


def test_the_table_counts_changes_that_every_detector_was_asked_about(tmp_path: Path) -> None:
    said = [("R1", "cases", 3, "a"), ("R1", "tests", 2, ""), ("R2", "cases", 0, "")]
    lines = [
        {"change": change, "detector": name, "of": of, "outcome": "survived"}
        | ({"outcome": "caught", "case": case} if case else {})
        for change, name, of, case in said
    ]
    (tmp_path / "answers.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
    wanted = [of_patch(BUG_BY_ID[name]) for name in ("R1", "R2", "R3")]
    told = table(answers(tmp_path), wanted).splitlines()
    assert told[2:5] == [
        "| patches noticed | 1 of 3 | 1 | 0 |",
        "| patches noticed by this one alone |  | 1 | 0 |",
        "| patches that nobody noticed | 0 |  |  |",
    ]
    assert told[-3:] == ["| R1 | `a` | - |", "| R2 | 0 |  |", "| R3 |  |  |"]
