"""The rank pool itself: a test that relies on it must be able to rely on it."""

from __future__ import annotations

import os
import time

import psutil
import pytest
import torch
import torch.distributed as dist

from bench.testing.workers import ForkServer
from oracle.ranks import GROUP_SIZES, RankFailureError, RankPool, mesh

pytestmark = pytest.mark.processes


def sum_of_ranks(group_size: int) -> tuple[int, float]:
    total = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(total, group=mesh(group_size).get_group("dp"))
    return os.getpid(), total.item()


def raise_on_rank_two() -> None:
    if dist.get_rank() == 2:
        raise ValueError("rank two had enough")
    dist.barrier()


def hang_on_rank_one() -> None:
    if dist.get_rank() == 1:
        time.sleep(3600)


def exit_on_rank_zero() -> None:
    if dist.get_rank() == 0:
        os._exit(7)


@pytest.mark.parametrize("group_size", GROUP_SIZES)
def test_groups_of_every_size_are_cut_out_of_one_world(ranks: RankPool, group_size: int) -> None:
    found = ranks.run(sum_of_ranks, group_size)
    assert [total for _, total in found] == [sum(range(group_size))] * 4
    # Ranks beyond the first group stand for what the first group did.
    assert len({pid for pid, _ in found}) == group_size


def test_one_launch_serves_many_calls(ranks: RankPool) -> None:
    first = [pid for pid, _ in ranks.run(sum_of_ranks, 4)]
    assert [pid for pid, _ in ranks.run(sum_of_ranks, 4)] == first


@pytest.mark.nightly  # tests/run/test_testing_workers.py asks most of it of the same ranks
def test_failures_are_reported_and_leave_no_process_behind(fork_server: ForkServer) -> None:
    pool = RankPool(fork_server)
    try:
        pool.run(sum_of_ranks, 1)
        started = pool.pids
        with pytest.raises(RankFailureError, match=r"rank 2: [^$]*rank two had enough"):
            pool.run(raise_on_rank_two)
        assert not any(psutil.pid_exists(pid) for pid in started)
        pool.run(sum_of_ranks, 1)
        with pytest.raises(RankFailureError, match=r"rank 1: no answer [^$]*hang_on_rank_one"):
            pool.run(hang_on_rank_one, seconds=1)
        with pytest.raises(RankFailureError, match=r"rank 0: died with exit code 7"):
            pool.run(exit_on_rank_zero)
        assert pool.pids == []
    finally:
        pool.close()


def test_a_function_that_ranks_cannot_find_is_refused(ranks: RankPool) -> None:
    with pytest.raises(TypeError, match="not a module-level function"):
        ranks.run(lambda: None)
