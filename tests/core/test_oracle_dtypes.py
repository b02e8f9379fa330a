"""Roundings of mixed main and communication dtypes, against emulated reductions."""

from __future__ import annotations

import pytest
import torch

from mfsdp_core import MixedPrecisionPolicy
from oracle.models import build
from oracle.ranks import RankPool
from oracle.reference import raw_gradients
from oracle.rounding import accumulate_then_reduce, reduce_then_accumulate, ulp_distance
from oracle.sharded import STRATEGIES, shard

pytestmark = pytest.mark.processes

MICROBATCHES = 3
EMULATED = {
    "no_shard": accumulate_then_reduce,
    "optim": accumulate_then_reduce,
    "optim_grads": reduce_then_accumulate,
    "optim_grads_params": reduce_then_accumulate,
}
COMBINATIONS = [
    pytest.param(torch.float32, torch.float32, torch.bfloat16, id="compute32-main32-comm16"),
    pytest.param(torch.float32, torch.bfloat16, torch.float32, id="compute32-main16-comm32"),
    pytest.param(torch.float32, torch.bfloat16, torch.bfloat16, id="compute32-main16-comm16"),
    pytest.param(torch.bfloat16, torch.float32, torch.bfloat16, id="compute16-main32-comm16"),
    pytest.param(torch.bfloat16, torch.float32, torch.float32, id="compute16-main32-comm32"),
    pytest.param(torch.bfloat16, torch.bfloat16, torch.bfloat16, id="compute16-main16-comm16"),
]


def distances(
    strategy: str,
    group_size: int,
    compute: torch.dtype,
    main: torch.dtype,
    comm: torch.dtype,
    transport: str,
) -> dict[str, float]:
    """Distance in ulps of the communication dtype, by parameter."""
    policy = MixedPrecisionPolicy(
        torch.float32, main, comm, reduce_dtype=comm if transport == "native" else None
    )
    toy = shard(
        "linear_stack",
        strategy,
        group_size,
        compute,
        mixed_precision_policy=policy,
        transport=transport,
    )
    toy.run_cycle(MICROBATCHES)
    raw = raw_gradients(
        build("linear_stack", compute), "linear_stack", group_size, MICROBATCHES, compute
    )
    total = comm if transport == "native" else torch.promote_types(main, comm)
    # The sum of an all-reduce travels once more, and in the communication dtype.
    expected = EMULATED[strategy](raw, main, comm, total=total, travels=strategy == "no_shard")
    found = toy.full_gradient()
    return {key: ulp_distance(found[key], expected[key], comm) for key in expected}


@pytest.mark.sample
@pytest.mark.parametrize(("compute", "main", "comm"), COMBINATIONS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_two_ranks_round_exactly_where_the_strategy_says(
    ranks: RankPool,
    strategy: str,
    compute: torch.dtype,
    main: torch.dtype,
    comm: torch.dtype,
) -> None:
    for found in ranks.run(distances, strategy, 2, compute, main, comm, "native"):
        assert max(found.values()) == 0, found


@pytest.mark.sample
@pytest.mark.parametrize("group_size", [2, 4])
@pytest.mark.parametrize(("compute", "main", "comm"), COMBINATIONS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_direct_exchange_sums_what_was_sent_in_the_dtype_of_the_main_gradients(
    ranks: RankPool,
    strategy: str,
    compute: torch.dtype,
    main: torch.dtype,
    comm: torch.dtype,
    group_size: int,
) -> None:
    for found in ranks.run(distances, strategy, group_size, compute, main, comm, "point_to_point"):
        assert max(found.values()) == 0, found


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_four_ranks_round_once_more_per_hop_at_most(ranks: RankPool, strategy: str) -> None:
    case = (strategy, 4, torch.float32, torch.float32, torch.bfloat16, "native")
    for found in ranks.run(distances, *case):
        assert max(found.values()) <= 3 * MICROBATCHES, found
