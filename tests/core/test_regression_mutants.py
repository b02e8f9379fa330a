"""The regression tests fail when their bug is put back; the daily suite checks that it can be."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.validate.bugs import BUGS, Bug
from mutants import bugs_with_tests, is_noticed

#: Bugs whose regression test is a test of the core; the others are the validator's alone.
TESTED = {f"R{n}" for n in range(1, 24)} - {"R10"}


def test_no_regression_test_of_a_known_bug_was_lost() -> None:
    assert {bug.id for bug in bugs_with_tests()} >= TESTED


def test_every_bug_has_one_number() -> None:
    assert len({bug.id for bug in BUGS}) == len(BUGS)
    assert [bug.id for bug in BUGS] == [f"R{n}" for n in range(1, 24)]


@pytest.mark.nightly
@pytest.mark.processes
@pytest.mark.parametrize("bug", bugs_with_tests(), ids=lambda bug: bug.id)
def test_the_regression_test_notices_the_bug(bug: Bug, tmp_path: Path) -> None:
    assert is_noticed(bug, tmp_path)
