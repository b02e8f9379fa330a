"""Turns: one run at a time, in reversed order every other round; nobody waits for the dead."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from itertools import pairwise

import pytest

from bench.launch.stop_request import PartialStop, StopRequest
from bench.launch.turns import TURNS_VARIABLE, Seat, Turns, Turnstile, TurnstileGoneError

Trained = tuple[float, float, str, int | None]


class Rank(threading.Thread):
    """Trains `steps` steps of a few milliseconds, in the place of a process."""

    def __init__(self, seat: Seat, name: str, steps: int, ends_at: int | None = None) -> None:
        super().__init__(daemon=True)
        count, _, path = seat.variables()[TURNS_VARIABLE].partition(":")
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
        except TurnstileGoneError as error:
            self.error = error
            self.turns.leave()


@pytest.fixture
def turnstile() -> Iterator[Turnstile]:
    with Turnstile({"base": 2, "head": 2}, 3) as made:
        yield made


def ranks_of(turnstile: Turnstile, steps: int = 9, **rest: int) -> list[Rank]:
    return [
        Rank(seat, f"{arm}", steps, **rest) for arm, seat in turnstile.seats.items() for _ in "ab"
    ]


def wait_until(true: Callable[[], bool]) -> None:
    for _ in range(500):
        if true():
            return
        time.sleep(0.01)
    raise AssertionError("it never came true")


def test_runs_train_one_at_a_time_and_every_other_round_is_reversed(turnstile) -> None:
    ranks = ranks_of(turnstile)
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


def test_the_clock_of_a_run_stands_while_all_of_its_ranks_are_parked(turnstile) -> None:
    seat = turnstile.seats["base"]
    first = Rank(seat, "base", 3)
    before = seat.clock()
    time.sleep(0.05)
    assert seat.clock() - before >= 0.05, "one of two ranks still starts up"
    second = Rank(seat, "base", 3)
    wait_until(lambda: seat.is_away)
    before = seat.clock()
    time.sleep(0.05)
    assert seat.clock() == before
    for one in [Rank(turnstile.seats["head"], "head", 3) for _ in "ab"]:
        one.join(5)
    first.join(5), second.join(5)
    before = seat.clock()
    time.sleep(0.02)
    assert seat.clock() > before


def test_the_dead_are_passed_over(turnstile) -> None:
    dead = [Rank(turnstile.seats["head"], "head", 9, ends_at=4) for _ in "ab"]
    alive = [Rank(turnstile.seats["base"], "base", 9) for _ in "ab"]
    for rank in (*dead, *alive):
        rank.join(5)
    assert [len(rank.trained) for rank in (*dead, *alive)] == [3, 3, 9, 9]


def test_parked_ranks_of_a_turnstile_that_closes_end_with_an_error() -> None:
    with Turnstile({"base": 1, "head": 1}, 2) as turnstile:
        rank = Rank(turnstile.seats["base"], "base", 4)
        wait_until(lambda: turnstile.seats["base"].is_away)
    rank.join(5)
    assert isinstance(rank.error, TurnstileGoneError)
    assert rank.trained == []


def test_a_rank_without_a_turnstile_takes_no_turns(monkeypatch) -> None:
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
