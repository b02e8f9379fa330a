"""Forked ranks as the validator and the tests of the core use them, and their clock."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from bench.testing.hang_clock import Activity, HangClock, activity, stretched
from bench.testing.workers import ForkServer, Workers, WorkersError

SECONDS = 60.0


class Machine:
    """A clock of two ranks, and what these have done so far."""

    def __init__(self) -> None:
        self.now = 0.0
        self.ranks = [Activity(1.0, asleep=True), Activity(7.0, asleep=True)]
        self.clock = HangClock([0, 1], lambda: self.now, lambda pid: self.ranks[pid])

    def seconds_after(self, passed: float, *, used: float, state: str) -> float:
        """The second rank has used the processor, and is in this state."""
        self.now += passed
        before = self.ranks[1].processor_seconds
        self.ranks[1] = Activity(before + used, asleep=state == "asleep")
        return self.clock.seconds()


def test_time_in_which_all_ranks_sleep_counts_and_so_does_what_the_busiest_computes() -> None:
    machine = Machine()
    assert machine.seconds_after(1.0, used=0.0, state="asleep") == 1.0
    assert machine.seconds_after(1.0, used=0.9, state="busy") == pytest.approx(1.9)
    assert machine.seconds_after(1.0, used=0.9, state="asleep") == pytest.approx(2.8)


def test_what_a_rank_waits_for_a_processor_is_no_hang() -> None:
    machine = Machine()
    for _ in range(100):
        seconds = machine.seconds_after(4.0, used=0.01, state="busy")
    assert seconds == pytest.approx(1.0)
    assert machine.seconds_after(1.0, used=0.0, state="asleep") == pytest.approx(2.0)


def test_whether_a_process_sleeps_is_read_from_the_kernel() -> None:
    pipe = subprocess.PIPE
    with subprocess.Popen(["cat"], stdin=pipe, stdout=pipe, bufsize=0) as waits:
        while not activity(waits.pid).asleep:
            pass  # it starts
        assert not activity(os.getpid()).asleep
    assert activity(waits.pid) == Activity(0.0, asleep=True)


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


def groups_with_another() -> tuple[int, int]:
    dist.new_group([0, 1])
    return os.getpid(), len(dist.distributed_c10d._world.pg_map)


@pytest.mark.processes
def test_groups_that_calls_have_made_last_so_many_calls(fork_server: ForkServer) -> None:
    with fork_server.workers(2, calls_of_a_group=2) as made:
        found = [made.run(groups_with_another, seconds=SECONDS)[0] for _ in range(3)]
    assert [(pid == found[0][0], groups) for pid, groups in found] == [
        (True, 2),
        (True, 3),
        (True, 2),
    ]


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
