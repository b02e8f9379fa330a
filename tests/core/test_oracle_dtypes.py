"""Roundings of mixed dtypes, against emulated reductions, on one axis and on two.

Two ranks per axis make every native reduction round exactly once, so the emulation, which runs in
one process on plain tensors, must be met to the last bit.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mfsdp_core import MixedPrecisionPolicy
from oracle.hybrid import PAIRS, hybrid
from oracle.models import build
from oracle.ranks import WORLD
from oracle.reference import Named, raw_gradients
from oracle.rounding import (
    accumulate_then_reduce,
    outer_stage,
    reduce_then_accumulate,
    ulp_distance,
)
from oracle.sharded import STRATEGIES, Sharded, shard

pytestmark = pytest.mark.on_ranks

NAME, MICROBATCHES = "linear_stack", 3
Dtypes = tuple[torch.dtype, torch.dtype, torch.dtype]
#: Compute, main gradients, communication.
COMBINATIONS = [
    pytest.param((torch.float32, torch.float32, torch.bfloat16), id="compute32-main32-comm16"),
    pytest.param((torch.float32, torch.bfloat16, torch.float32), id="compute32-main16-comm32"),
    pytest.param((torch.float32, torch.bfloat16, torch.bfloat16), id="compute32-main16-comm16"),
    pytest.param((torch.bfloat16, torch.float32, torch.bfloat16), id="compute16-main32-comm16"),
    pytest.param((torch.bfloat16, torch.float32, torch.float32), id="compute16-main32-comm32"),
    pytest.param((torch.bfloat16, torch.bfloat16, torch.bfloat16), id="compute16-main16-comm16"),
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


def compare_emulated(
    inner: str,
    outer: str | None,
    size: int,
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype],
    transport: str,
    most: int = 0,
) -> None:
    """A cycle with the emulation. most: apart, in ulps of the communication dtype."""
    compute, main, comm = dtypes
    is_native = transport == "native"
    policy = MixedPrecisionPolicy(
        torch.float32, main, comm, reduce_dtype=comm if is_native else None
    )
    options: dict[str, Any] = {"mixed_precision_policy": policy, "transport": transport}
    if outer is None:
        toy: Sharded = shard(NAME, inner, size, compute, **options)
    else:
        toy = hybrid(inner, outer, 2, compute, NAME, **options)
    toy.run_cycle(MICROBATCHES)
    found = toy.full_gradient()
    for key, wanted in emulated(inner, outer, size, compute, main, comm, is_native).items():
        ulps = ulp_distance(found[key], wanted, comm)
        assert ulps <= most, f"gradient of {key}: {ulps} ulps apart"


@pytest.mark.sample
@pytest.mark.parametrize("dtypes", COMBINATIONS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_two_ranks_round_exactly_where_the_strategy_says(strategy: str, dtypes: Dtypes) -> None:
    compare_emulated(strategy, None, 2, dtypes, "native")


@pytest.mark.sample
@pytest.mark.parametrize("group_size", [2, 4])
@pytest.mark.parametrize("dtypes", COMBINATIONS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_direct_exchange_sums_what_was_sent_in_the_dtype_of_the_main_gradients(
    strategy: str, dtypes: Dtypes, group_size: int
) -> None:
    compare_emulated(strategy, None, group_size, dtypes, "point_to_point")


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_four_ranks_round_once_more_per_hop_at_most(strategy: str) -> None:
    dtypes = (torch.float32, torch.float32, torch.bfloat16)
    compare_emulated(strategy, None, 4, dtypes, "native", most=3 * MICROBATCHES)


@pytest.mark.sample
@pytest.mark.parametrize("transport", ["native", "point_to_point"])
@pytest.mark.parametrize(
    "dtypes", [one for one in COMBINATIONS if torch.bfloat16 in one.values[0][1:]]
)
@pytest.mark.parametrize(("inner", "outer"), PAIRS)
def test_gradients_are_rounded_once_more_for_the_outer_axis_and_nowhere_else(
    inner: str, outer: str, dtypes: Dtypes, transport: str
) -> None:
    compare_emulated(inner, outer, WORLD, dtypes, transport)
