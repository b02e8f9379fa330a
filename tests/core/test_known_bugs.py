"""Known bugs are noticed by a test of the core; `tests/run/test_patches.py` says they fit."""

from __future__ import annotations

from pathlib import Path

import pytest

from mutants import SEEN_BY_TESTS, TESTED, TESTS, is_noticed
from tools.bug_in_a_copy import BUGS, OWN_BUGS, Bug


def test_every_known_bug_has_a_test() -> None:
    # R10 is the validator's alone.
    assert SEEN_BY_TESTS.keys() == {bug.id for bug in (*BUGS, *OWN_BUGS)} - {"R10"}
    for file, names in SEEN_BY_TESTS.values():
        assert names.partition(" and ")[0] in (TESTS / file).read_text()


@pytest.mark.nightly
@pytest.mark.processes
@pytest.mark.parametrize("bug", TESTED, ids=lambda bug: bug.id)
def test_a_test_notices_the_bug(bug: Bug, tmp_path: Path) -> None:
    assert is_noticed(bug, tmp_path)
