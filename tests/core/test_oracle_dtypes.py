"""Roundings of mixed dtypes, against emulated reductions, on one axis and on two.

Two ranks per axis make every native reduction round exactly once, so the emulation, which runs in
one process on plain tensors, must be met to the last bit.
"""

from __future__ import annotations

import pytest
import torch

from mfsdp_core import MixedPrecisionPolicy
from oracle.hybrid import PAIRS, hybrid
from oracle.models import build
from oracle.ranks import WORLD, RankPool
from oracle.reference import Named, raw_gradients
from oracle.rounding import (
    accumulate_then_reduce,
    outer_stage,
    reduce_then_accumulate,
    ulp_distance,
)
from oracle.sharded import STRATEGIES, shard

pytestmark = pytest.mark.processes

NAME, MICROBATCHES = "linear_stack", 3
COMBINATIONS = [
    pytest.param(torch.float32, torch.float32, torch.bfloat16, id="compute32-main32-comm16"),
    pytest.param(torch.float32, torch.bfloat16, torch.float32, id="compute32-main16-comm32"),
    pytest.param(torch.float32, torch.bfloat16, torch.bfloat16, id="compute32-main16-comm16"),
    pytest.param(torch.bfloat16, torch.float32, torch.bfloat16, id="compute16-main32-comm16"),
    pytest.param(torch.bfloat16, torch.float32, torch.float32, id="compute16-main32-comm32"),
    pytest.param(torch.bfloat16, torch.bfloat16, torch.bfloat16, id="compute16-main16-comm16"),
]


def emulated(
    inner: str,
    outer: str | None,
    size: int,
    compute: torch.dtype,
    main: torch.dtype,
    comm: torch.dtype,
    native: bool,
) -> Named:
    """In one process. Direct exchange adds up in `main`; an all-reduced sum travels once more."""
    total = comm if native else torch.promote_types(main, comm)
    raw = raw_gradients(build(NAME, compute), NAME, size, MICROBATCHES, compute)
    whole = inner in {"no_shard", "optim"}
    stage = accumulate_then_reduce if whole else reduce_then_accumulate
    row = size if outer is None else size // 2
    per_outer_rank = [
        stage(
            raw[first : first + row],
            main,
            comm,
            total=total,
            travels=inner == "no_shard",
            divisor=size,
        )
        for first in range(0, size, row)
    ]
    if outer is None:
        return per_outer_rank[0]
    return outer_stage(per_outer_rank, main, comm, total=total, travels=outer == "no_shard")


def distances(
    inner: str,
    outer: str | None,
    size: int,
    compute: torch.dtype,
    main: torch.dtype,
    comm: torch.dtype,
    transport: str,
) -> dict[str, float]:
    """In a rank: distance from the emulation in ulps of the communication dtype, by parameter."""
    reduce = comm if transport == "native" else None
    options = {
        "mixed_precision_policy": MixedPrecisionPolicy(
            torch.float32, main, comm, reduce_dtype=reduce
        ),
        "transport": transport,
    }
    if outer is None:
        toy = shard(NAME, inner, size, compute, **options)
    else:
        toy = hybrid(inner, outer, 2, compute, NAME, **options)
    toy.run_cycle(MICROBATCHES)
    found = toy.full_gradient()
    expected = emulated(inner, outer, size, compute, main, comm, transport == "native")
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
    for found in ranks.run(distances, strategy, None, 2, compute, main, comm, "native"):
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
    case = (strategy, None, group_size, compute, main, comm, "point_to_point")
    for found in ranks.run(distances, *case):
        assert max(found.values()) == 0, found


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_four_ranks_round_once_more_per_hop_at_most(ranks: RankPool, strategy: str) -> None:
    case = (strategy, None, 4, torch.float32, torch.float32, torch.bfloat16, "native")
    for found in ranks.run(distances, *case):
        assert max(found.values()) <= 3 * MICROBATCHES, found


@pytest.mark.sample
@pytest.mark.parametrize("transport", ["native", "point_to_point"])
@pytest.mark.parametrize(
    ("compute", "main", "comm"), [one for one in COMBINATIONS if torch.bfloat16 in one.values[1:]]
)
@pytest.mark.parametrize(("inner", "outer"), PAIRS)
def test_gradients_are_rounded_once_more_for_the_outer_axis_and_nowhere_else(
    ranks: RankPool,
    inner: str,
    outer: str,
    compute: torch.dtype,
    main: torch.dtype,
    comm: torch.dtype,
    transport: str,
) -> None:
    for found in ranks.run(distances, inner, outer, WORLD, compute, main, comm, transport):
        assert max(found.values()) == 0, found
