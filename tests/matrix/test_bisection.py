"""The search for the first bad commit of a row."""

from __future__ import annotations

import pytest

from sweeps.bisection import first_bad

COMMITS = [f"c{number}" for number in range(30)]


def found(first: int, unusable: set[int] = frozenset()):
    looked = []

    def look(commit: str):
        number = int(commit[1:])
        looked.append(number)
        if number in unusable:
            return "skip"
        return "bad" if number >= first else "good"

    result = first_bad(COMMITS, look)
    assert len(set(looked)) == len(looked)
    return result, len(looked)


def test_every_place_is_found_in_at_most_five_looks():
    for first in range(30):
        candidates, looks = found(first)
        assert (candidates, looks <= 5) == ([f"c{first}"], True)


@pytest.mark.parametrize("first", [0, 7, 15, 29])
def test_commits_that_cannot_run_are_gone_around(first):
    unusable = set(range(30)) - {first, first - 1, 29, 3, 21}
    assert found(first, unusable)[0] == [f"c{first}"]


def test_where_only_unusable_ones_are_left_all_are_candidates():
    assert found(15, {13, 14, 15, 16})[0] == ["c13", "c14", "c15", "c16", "c17"]


def test_a_single_commit_needs_no_look():
    assert first_bad(["c0"], lambda _: pytest.fail("looked")) == ["c0"]
