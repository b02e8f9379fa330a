"""The rank pool itself: a test that relies on it must be able to rely on it."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist

from oracle.ranks import GROUP_SIZES, RankPool, mesh

pytestmark = pytest.mark.processes


def sum_of_ranks(group_size: int) -> tuple[int, float]:
    total = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(total, group=mesh(group_size).get_group("dp"))
    return os.getpid(), total.item()


@pytest.mark.parametrize("group_size", GROUP_SIZES)
def test_groups_of_every_size_are_cut_out_of_one_world(ranks: RankPool, group_size: int) -> None:
    found = ranks.run(sum_of_ranks, group_size)
    assert [total for _, total in found] == [sum(range(group_size))] * 4
    # Ranks beyond the first group stand for what the first group did.
    assert len({pid for pid, _ in found}) == group_size


def test_one_launch_serves_many_calls(ranks: RankPool) -> None:
    first = [pid for pid, _ in ranks.run(sum_of_ranks, 4)]
    assert [pid for pid, _ in ranks.run(sum_of_ranks, 4)] == first


def test_a_function_that_ranks_cannot_find_is_refused(ranks: RankPool) -> None:
    with pytest.raises(TypeError, match="not a module-level function"):
        ranks.run(lambda: None)
