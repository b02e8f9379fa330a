"""Cases side by side: results keep their order, and nothing works on for a caller that has left."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from typing import Any

import pytest

from bench.validate.session import side_by_side


@dataclass
class Ranks:
    """Stands in for a set of ranks."""

    killed: threading.Event = field(default_factory=threading.Event)

    def kill(self) -> None:
        self.killed.set()


def sets(count: int) -> list[Any]:
    return [Ranks() for _ in range(count)]


@pytest.mark.parametrize("count", [1, 2, 3])
def test_results_come_in_the_order_of_the_items_whichever_ends_first(count: int) -> None:
    def slow_first(_ranks: object, item: int) -> int:
        time.sleep(0.02 * (item % 3 == 0))
        return -item

    found = list(side_by_side(sets(count), range(10), slow_first))
    assert found == [(item, -item) for item in range(10)]


def test_two_sets_work_at_the_same_time_and_each_on_one_item() -> None:
    both = threading.Barrier(2, timeout=200)
    busy: list[object] = []

    def meets(ranks: object, _item: int) -> bool:
        both.wait()
        busy.append(ranks)
        return True

    ranks = sets(2)
    assert all(result for _, result in side_by_side(ranks, range(6), meets))
    assert {id(one) for one in busy} == {id(one) for one in ranks}


def test_a_caller_that_leaves_ends_what_works_ahead() -> None:
    def until_killed(ranks: Any, item: int) -> None:
        if item and not ranks.killed.wait(timeout=200):
            raise AssertionError("nobody ended this")

    ranks = sets(2)
    found = side_by_side(ranks, range(100), until_killed)
    assert next(found) == (0, None)
    found.close()
    assert all(one.killed.is_set() for one in ranks)


def test_what_a_case_raises_reaches_the_caller() -> None:
    def fails(_ranks: object, item: int) -> None:
        raise ValueError(f"item {item}")

    with pytest.raises(ValueError, match="item 0"):
        list(side_by_side(sets(2), range(3), fails))
