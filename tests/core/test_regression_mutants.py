"""The regression tests fail when their bug is put back; the daily suite checks that it can be."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.validate.bugs import BUGS, Bug
from bench.validate.mutation import copy_of_core
from mutants import bugs_with_tests, is_noticed

#: Bugs whose regression test is a test of the core; the others are the validator's alone.
TESTED = {f"R{n}" for n in range(1, 22)} - {"R10", "R16", "R17"}
BY_BUG = pytest.mark.parametrize("bug", [b for b in BUGS if b.changes], ids=lambda bug: bug.id)


def test_no_regression_test_of_a_known_bug_was_lost() -> None:
    assert {bug.id for bug in bugs_with_tests()} >= TESTED


def test_every_bug_has_one_number_and_either_changes_or_a_reason_against_them() -> None:
    assert len({bug.id for bug in BUGS}) == len(BUGS)
    assert all(bool(bug.changes) != bool(bug.without_changes) for bug in BUGS)


@BY_BUG
def test_a_bug_still_fits_the_source(bug: Bug, tmp_path: Path) -> None:
    copy_of_core(tmp_path, bug.changes)
    assert all(change.old != change.new for change in bug.changes)


@pytest.mark.nightly
@pytest.mark.processes
@pytest.mark.parametrize("bug", bugs_with_tests(), ids=lambda bug: bug.id)
def test_the_regression_test_notices_the_bug(bug: Bug, tmp_path: Path) -> None:
    assert is_noticed(bug, tmp_path)
