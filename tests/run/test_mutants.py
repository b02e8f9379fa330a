"""Mutants: the same for ever, of every room, and each a real change of one place that compiles."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from bench.testing.workers import ForkServer
from bench.validate.matrix import cases
from bench.validate.patched_core import CORE, copy_of_core
from tools.mutation.case_trials import executing
from tools.mutation.line_coverage import CoverageFile, noting_core
from tools.mutation.mutants import Mutant, mutants_of, sample
from tools.mutation.pytest_run import Ran, run_pytest
from tools.mutation.test_trials import TestTrials

SOURCE = '''"""Text."""

def divided(total: int, ranks: int = 2) -> float:
    """More text."""
    if ranks < 1:
        raise ValueError(f"{ranks - 1} is too few")
    work.wait()
    publish(total + 1)
    self.inner = total / ranks
    return self.inner
'''


def changed(kind: str) -> list[str]:
    found = [m for m in mutants_of("runtime/x.py", SOURCE) if m.kind == kind]
    assert all(m.function == "divided" for m in found)
    return [line for m in found for line in m.source(SOURCE).splitlines() if line not in LINES]


LINES = SOURCE.splitlines()
SOURCES = [*CORE.rglob("*.py")]


def test_every_kind_of_change_is_made_where_results_depend_on_it() -> None:
    assert changed("condition negated") == ["    if (not (ranks < 1)):"]
    assert changed("comparison shifted") == ["    if (ranks <= 1):"]
    assert changed("wait skipped") == ["    pass"]
    assert changed("operator changed") == ["    self.inner = (total * ranks)"]
    assert changed("exchanged") == ["    return self.outer"]
    assert changed("statement dropped") == ["        pass", "    pass"]
    assert changed("number shifted") == [
        "def divided(total: int, ranks: int = 3) -> float:",
        "    if ranks < 2:",
    ]


def test_a_sample_has_mutants_of_every_room_and_depends_on_the_seed_alone() -> None:
    drawn = sample(seed=3, per_room=2)
    rooms = {path.name for path in CORE.iterdir() if path.is_dir() and path.name[0] != "_"}
    assert {mutant.room for mutant in drawn} == rooms | {"top"}
    assert drawn == sample(seed=3, per_room=2)
    assert drawn != sample(seed=4, per_room=2)
    assert {mutant.room for mutant in sample(seed=3, per_room=1, rooms=("comm",))} == {"comm"}


def test_a_mutant_changes_one_file_of_a_copy(tmp_path: Path) -> None:
    mutant: Mutant = sample(seed=3, per_room=1, rooms=("plan",))[0]
    core = copy_of_core(tmp_path)
    mutant.write(core)
    differing = [
        str(file.relative_to(core))
        for file in sorted(core.rglob("*.py"))
        if file.read_text() != (CORE / file.relative_to(core)).read_text()
    ]
    assert differing == [mutant.file]
    ast.parse((core / mutant.file).read_text())


def test_a_mutant_meets_every_case_of_its_line_and_no_other(tmp_path: Path) -> None:
    mutant = next(m for m in sample(seed=3, per_room=5, rooms=("plan",)) if m.function)
    known = CoverageFile(tmp_path / "lines")
    elsewhere, *about = cases("mfsdp", full=False)
    for case in about:
        known.add(case, 1.0, {mutant.file: {mutant.statement[1]}})
    known.add(elsewhere, 1.0, {"wrapper.py": {1, 2, 3}})
    chosen = executing(mutant, [elsewhere, *about], CoverageFile(tmp_path / "lines"))
    assert sorted(case.id for case in chosen) == sorted(case.id for case in about) != []


def test_a_mutant_meets_tests_of_its_line_those_with_numbers_first_and_every_file_in_turn(
    tmp_path: Path,
) -> None:
    mutant = next(m for m in sample(seed=3, per_room=5, rooms=("plan",)) if m.function)
    own, other = {mutant.file: {mutant.statement[1]}}, {"wrapper.py": {1, 2, 3}}
    near = {mutant.file: {mutant.statement[1] + 1}}
    grouping, pools = "tests/core/test_plan_fine_grained.py", "tests/core/test_plan_pools.py"
    silent = f"{grouping}::test_an_explicit_setting_overrides_the_rule"
    numbers = f"{grouping}::test_a_run_that_leaves_it_open_has_the_name_of_what_the_rule_chooses"
    also = f"{pools}::test_a_pool_of_nothing_is_empty"
    beside = f"{pools}::test_arguments_that_contradict_are_refused"
    tests = {
        grouping: {silent: own, f"{numbers}[1]": own | other, f"{numbers}[2]": own | other},
        pools: {also: own, beside: near},
    }
    trials = TestTrials(ForkServer(), tmp_path / "known")
    for file, lines in tests.items():
        trials.keep(file, Ran(lines=lines))
    assert trials.executing(mutant) == [also, f"{numbers}[1]", silent, f"{numbers}[2]"]


@pytest.mark.processes
def test_lines_that_ranks_of_a_test_execute_are_noted(
    fork_server: ForkServer, tmp_path: Path
) -> None:
    core, file = noting_core(tmp_path), "tests/core/conformance/test_transports_conform.py"
    test = f"{file}::test_a_group_of_several_names_is_registered_once_and_agrees_on_all_ranks"
    assert all((core / one.relative_to(CORE)).read_text() == one.read_text() for one in SOURCES)
    with fork_server.workers(1, tmp_path) as workers:
        (ran,) = workers.run(run_pytest, str(tmp_path), (test,), True, seconds=120.0)
    assert ran.failed is None
    (lines,) = ran.lines.values()
    assert lines["comm/symmetric.py"]
    beginnings = {
        node.lineno
        for node in ast.walk(ast.parse((CORE / "comm/symmetric.py").read_text()))
        if isinstance(node, ast.stmt)
    }
    assert lines["comm/symmetric.py"] < beginnings
