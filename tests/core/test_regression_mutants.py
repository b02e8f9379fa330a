"""The regression tests fail when their bug is put back; the daily suite checks that it can be."""

from __future__ import annotations

from pathlib import Path

import pytest

from mutants import MUTANTS, ROOT, Mutant, is_noticed

BUGS = {"R1", "R2", "R3", "R4", "R5", "R8", "R19", "R20", "R21"}
BY_BUG = pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.bug)


def test_every_historical_bug_has_a_mutant() -> None:
    assert {mutant.bug for mutant in MUTANTS} == BUGS


@BY_BUG
def test_a_mutant_still_fits_the_source_and_has_a_test(mutant: Mutant) -> None:
    for file, old, new in mutant.changes:
        assert (ROOT / "mfsdp_core" / file).read_text().count(old) == 1
        assert old != new
    tests = (ROOT / "tests" / "core" / mutant.test_file).read_text()
    assert f"def {mutant.selection}" in tests


@pytest.mark.nightly
@pytest.mark.processes
@BY_BUG
def test_the_regression_test_notices_the_bug(mutant: Mutant, tmp_path: Path) -> None:
    assert is_noticed(mutant, tmp_path)
