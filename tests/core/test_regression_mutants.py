"""The regression tests fail when their bug is injected; the daily suite checks that it can be."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.validate.bugs import BUGS, Bug
from bench.validate.patched_core import copy_of_core
from mutants import OWN_BUGS, SEEN_BY_TESTS, TESTS, bugs_with_tests, is_noticed, is_noticed_by

#: Bugs whose regression test is a test of the core; the others are the validator's alone.
TESTED = {f"R{n}" for n in range(1, 24)} - {"R10"}


def test_no_regression_test_of_a_known_bug_was_lost() -> None:
    assert {bug.id for bug in bugs_with_tests()} >= TESTED


def test_every_bug_has_one_number() -> None:
    assert len({bug.id for bug in BUGS}) == len(BUGS)
    assert [bug.id for bug in BUGS] == [f"R{n}" for n in range(1, 24)]


def test_a_bug_that_validate_cannot_see_has_its_test_and_fits_the_source(tmp_path: Path) -> None:
    assert {bug.id for bug in OWN_BUGS} == SEEN_BY_TESTS.keys()
    for bug in OWN_BUGS:
        (tmp_path / bug.id).mkdir()
        copy_of_core(tmp_path / bug.id, bug.patch)


@pytest.mark.nightly
@pytest.mark.processes
@pytest.mark.parametrize("bug", OWN_BUGS, ids=lambda bug: bug.id)
def test_a_bug_that_validate_cannot_see_is_noticed_by_its_test(bug: Bug, tmp_path: Path) -> None:
    file, names = SEEN_BY_TESTS[bug.id]
    assert is_noticed_by([TESTS / file], names, bug, tmp_path)


@pytest.mark.nightly
@pytest.mark.processes
@pytest.mark.parametrize("bug", bugs_with_tests(), ids=lambda bug: bug.id)
def test_the_regression_test_notices_the_bug(bug: Bug, tmp_path: Path) -> None:
    assert is_noticed(bug, tmp_path)
