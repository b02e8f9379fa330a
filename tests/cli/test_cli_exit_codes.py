"""Which exit code stands when several apply."""

from __future__ import annotations

import itertools

import pytest

from bench.cli.exit_codes import worst

ORDER = [130, 6, 2, 3, 1, 5, 4, 0]


def test_nothing_to_say_is_0():
    assert worst([]) == 0


@pytest.mark.parametrize(("stronger", "weaker"), list(itertools.combinations(ORDER, 2)))
def test_the_stronger_code_stands(stronger, weaker):
    assert worst([weaker, stronger]) == worst([stronger, weaker]) == stronger
