"""Known bugs are noticed by a test of the core; every day it is checked that they still fit in."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.validate.bugs import BUGS, Bug
from bench.validate.patched_core import copy_of_core
from mutants import OWN_BUGS, SEEN_BY_TESTS, TESTED, TESTS, is_noticed

#: R10 is the validator's alone.
NUMBERS = [f"R{n}" for n in range(1, 24)]


def test_every_known_bug_has_a_number_a_patch_that_fits_and_a_test(tmp_path: Path) -> None:
    assert [bug.id for bug in BUGS] == NUMBERS
    assert SEEN_BY_TESTS.keys() == {*NUMBERS, *(bug.id for bug in OWN_BUGS)} - {"R10"}
    for file, names in SEEN_BY_TESTS.values():
        assert names.partition(" and ")[0] in (TESTS / file).read_text()
    for bug in OWN_BUGS:
        (tmp_path / bug.id).mkdir()
        copy_of_core(tmp_path / bug.id, bug.patch)


@pytest.mark.nightly
@pytest.mark.processes
@pytest.mark.parametrize("bug", TESTED, ids=lambda bug: bug.id)
def test_a_test_notices_the_bug(bug: Bug, tmp_path: Path) -> None:
    assert is_noticed(bug, tmp_path)
