"""Forked ranks as the validator and the tests of the core use them, and their clock."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from bench.testing.load_clock import LoadClock, stretched
from bench.testing.workers import ForkServer, Workers, WorkersError

SECONDS = 60.0


class Machine:
    """A clock and a load that the test sets."""

    def __init__(self) -> None:
        self.now = 0.0
        self.runnable = 1

    def clock(self, cores: int = 2) -> LoadClock:
        return LoadClock(lambda: self.now, lambda: self.runnable, cores)


def test_a_second_counts_the_share_that_a_process_gets() -> None:
    machine = Machine()
    clock = machine.clock()
    machine.now, machine.runnable = 3.0, 6
    assert clock.seconds() == pytest.approx(1.0)
    machine.now, machine.runnable = 4.0, 2
    assert clock.seconds() == pytest.approx(2.0)


def test_a_limit_is_reached_however_busy_the_machine_is() -> None:
    machine = Machine()
    clock = machine.clock()
    machine.now, machine.runnable = 80.0, 10_000
    assert clock.seconds() == pytest.approx(10.0)


def test_a_limit_that_others_watch_grows_with_the_load_and_not_for_ever() -> None:
    assert stretched(3.0, lambda: 1, cores=2) == 3.0
    assert stretched(3.0, lambda: 8, cores=2) == 12.0
    assert stretched(3.0, lambda: 10_000, cores=2) == 24.0


def world_and_sum() -> tuple[int, int, float]:
    total = torch.tensor([1.0 + dist.get_rank()])
    dist.all_reduce(total)
    return os.getpid(), dist.get_world_size(), total.item()


def killed_on_rank_one() -> None:
    print("about to end", flush=True)  # noqa: T201
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.fixture(scope="module")
def workers(fork_server: ForkServer) -> Iterator[Workers]:
    with fork_server.workers(3) as made:
        yield made


@pytest.mark.processes
def test_groups_of_different_sizes_are_cut_out_of_the_same_ranks(workers: Workers) -> None:
    three = workers.run(world_and_sum, seconds=SECONDS)
    two = workers.run(world_and_sum, seconds=SECONDS, ranks=2)
    again = workers.run(world_and_sum, seconds=SECONDS)
    assert [found[1:] for found in three] == [found[1:] for found in again] == [(3, 6.0)] * 3
    assert [found[1:] for found in two] == [(2, 3.0)] * 2
    assert [found[0] for found in two] == [found[0] for found in three[:2]] == workers.pids[:2]


@pytest.mark.processes
def test_a_rank_that_dies_is_told_with_its_signal_and_its_last_words(workers: Workers) -> None:
    with pytest.raises(WorkersError) as caught:
        workers.run(killed_on_rank_one, seconds=SECONDS)
    (failure,) = caught.value.failures
    assert (failure.rank, failure.kind) == (1, "died")
    assert failure.text == "died with SIGKILL"
    assert failure.log == ("about to end",)
    assert sorted(caught.value.returned) == [0, 2]
    assert workers.pids == []
    assert len(workers.run(world_and_sum, seconds=SECONDS)) == 3
