"""Turns: one run at a time, in reversed order every other round; nobody waits for the dead."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from itertools import pairwise

import pytest

from bench.launch.stop_request import PartialStop, StopRequest
from bench.launch.turns import TURNS_VARIABLE, Barrier, BarrierGoneError, BarrierSlot, Turns

Trained = tuple[float, float, str, int | None]


class Rank(threading.Thread):
    """Trains `steps` steps of a few milliseconds, in the place of a process."""

    def __init__(
        self, slot: BarrierSlot, name: str, steps: int, ends_at: int | None = None
    ) -> None:
        super().__init__(daemon=True)
        count, _, path = slot.variables()[TURNS_VARIABLE].partition(":")
        self.turns = Turns.at(path, int(count), steps)
        self.steps, self.arm, self.ends_at = steps, name, ends_at
        self.trained: list[Trained] = []
        self.reported = 0.0
        self.error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            for step in range(1, self.steps + 1):
                turn = self.turns.before(step)
                begun = time.monotonic()
                if step == self.ends_at:
                    return self.turns.leave()
                time.sleep(0.002)
                self.trained.append((begun, time.monotonic(), self.arm, turn))
            self.turns.after_all_steps()
            self.reported = time.monotonic()
            time.sleep(0.002)
            self.turns.leave()
        except BarrierGoneError as error:
            self.error = error
            self.turns.leave()


@pytest.fixture
def barrier() -> Iterator[Barrier]:
    with Barrier({"base": 2, "head": 2}, 3) as made:
        yield made


def ranks_of(barrier: Barrier, steps: int = 9, **rest: int) -> list[Rank]:
    return [
        Rank(slot, f"{arm}", steps, **rest) for arm, slot in barrier.slots.items() for _ in "ab"
    ]


def wait_until(true: Callable[[], bool]) -> None:
    for _ in range(500):
        if true():
            return
        time.sleep(0.01)
    raise AssertionError("it never came true")


def test_runs_train_one_at_a_time_and_every_other_round_is_reversed(barrier) -> None:
    ranks = ranks_of(barrier)
    for rank in ranks:
        rank.join(5)
    trained = sorted(one for rank in ranks for one in rank.trained)
    assert len(trained) == 4 * 9
    assert all(one[1] <= two[0] for one, two in pairwise(trained) if one[2] != two[2])
    turns = list(dict.fromkeys((arm, turn) for _, _, arm, turn in trained))
    orders = [("base", "head"), ("head", "base"), ("base", "head")]
    assert turns == [(arm, turn) for turn, order in enumerate(orders) for arm in order]
    last_step = max(one[1] for one in trained)
    assert all(rank.reported >= last_step for rank in ranks), "a report beside a measured step"


def test_the_clock_of_a_run_stands_while_all_of_its_ranks_are_parked(barrier) -> None:
    slot = barrier.slots["base"]
    first = Rank(slot, "base", 3)
    before = slot.clock()
    time.sleep(0.05)
    assert slot.clock() - before >= 0.05, "one of two ranks still starts up"
    second = Rank(slot, "base", 3)
    wait_until(lambda: slot.is_away)
    before = slot.clock()
    time.sleep(0.05)
    assert slot.clock() == before
    for one in [Rank(barrier.slots["head"], "head", 3) for _ in "ab"]:
        one.join(5)
    first.join(5), second.join(5)
    before = slot.clock()
    time.sleep(0.02)
    assert slot.clock() > before


def test_the_dead_are_passed_over(barrier) -> None:
    dead = [Rank(barrier.slots["head"], "head", 9, ends_at=4) for _ in "ab"]
    alive = [Rank(barrier.slots["base"], "base", 9) for _ in "ab"]
    for rank in (*dead, *alive):
        rank.join(5)
    assert [len(rank.trained) for rank in (*dead, *alive)] == [3, 3, 9, 9]


def test_parked_ranks_of_a_barrier_that_closes_end_with_an_error() -> None:
    with Barrier({"base": 1, "head": 1}, 2) as barrier:
        rank = Rank(barrier.slots["base"], "base", 4)
        wait_until(lambda: barrier.slots["base"].is_away)
    rank.join(5)
    assert isinstance(rank.error, BarrierGoneError)
    assert rank.trained == []


def test_a_rank_without_a_barrier_takes_no_turns(monkeypatch) -> None:
    monkeypatch.delenv(TURNS_VARIABLE, raising=False)
    turns = Turns.from_environment(4)
    assert turns.before(1) is None
    turns.after_all_steps()
    turns.leave()


def test_one_of_several_runs_is_stopped_alone_or_with_all_of_them() -> None:
    whole = StopRequest()
    alone, other = PartialStop(whole), PartialStop(whole)
    alone.why = "its block was lost"
    alone.set()
    assert (alone.is_set(), other.is_set(), whole.is_set()) == (True, False, False)
    whole.why = "interrupted by the user"
    whole.set()
    assert (alone.is_set(), alone.why) == (True, "its block was lost")
    assert (other.is_set(), other.why) == (True, "interrupted by the user")
