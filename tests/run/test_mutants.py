"""Mutants: the same for ever, of every room, and each a real change of one place that compiles."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from bench.testing.workers import ForkServer
from bench.validate.patched_core import CORE, copy_of_core
from tools.mutation.mutants import Mutant, mutants_of, sample
from tools.mutation.pytest_run import ROOT, run_pytest

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


@pytest.mark.processes
def test_lines_that_ranks_of_a_test_execute_are_noted(fork_server: ForkServer) -> None:
    file = "tests/core/conformance/test_user_buffer_groups.py"
    with fork_server.workers(1, ROOT) as workers:
        (ran,) = workers.run(run_pytest, str(ROOT), (file,), True, seconds=120.0)
    assert ran.failed is None
    (lines,) = ran.lines.values()
    assert lines["comm/symmetric.py"]
