"""Gradients of 2 x 2 hybrid sharding: exact in full precision, and rounded where section 1.4 says.

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

pytestmark = pytest.mark.processes

F64, F32, B16 = torch.float64, torch.float32, torch.bfloat16
NAME = "linear_stack"
INNER = OUTER = 2
MICROBATCHES = 3
#: Compute, main gradients, communication.
ROUNDINGS = [(F32, F32, B16), (B16, F32, B16), (F32, B16, F32), (B16, B16, B16)]


def emulated(
    inner: str, outer: str, compute: torch.dtype, main: torch.dtype, comm: torch.dtype, native: bool
) -> Named:
    """In one process. Direct exchange adds up in `main`; an all-reduced sum travels once more."""
    total = comm if native else torch.promote_types(main, comm)
    raw = raw_gradients(build(NAME, compute), NAME, WORLD, MICROBATCHES, compute)
    whole = inner in {"no_shard", "optim"}
    stage = accumulate_then_reduce if whole else reduce_then_accumulate
    per_outer_rank = [
        stage(
            raw[first : first + INNER],
            main,
            comm,
            total=total,
            travels=inner == "no_shard",
            divisor=WORLD,
        )
        for first in range(0, WORLD, INNER)
    ]
    return outer_stage(per_outer_rank, main, comm, total=total, travels=outer == "no_shard")


def distances(
    inner: str,
    outer: str,
    compute: torch.dtype,
    main: torch.dtype,
    comm: torch.dtype,
    transport: str,
) -> dict[str, float]:
    """In a rank: distance from the emulation in ulps of the communication dtype, by parameter."""
    reduce = comm if transport == "native" else None
    policy = MixedPrecisionPolicy(F32, main, comm, reduce_dtype=reduce)
    toy = hybrid(
        inner, outer, OUTER, compute, NAME, mixed_precision_policy=policy, transport=transport
    )
    toy.run_cycle(MICROBATCHES)
    found = toy.full_gradient()
    expected = emulated(inner, outer, compute, main, comm, transport == "native")
    return {key: ulp_distance(found[key], expected[key], comm) for key in expected}


@pytest.mark.sample
@pytest.mark.parametrize("transport", ["native", "point_to_point"])
@pytest.mark.parametrize(("compute", "main", "comm"), ROUNDINGS)
@pytest.mark.parametrize(("inner", "outer"), PAIRS)
def test_hybrid_gradients_are_rounded_once_more_for_the_outer_axis_and_nowhere_else(
    ranks: RankPool,
    inner: str,
    outer: str,
    compute: torch.dtype,
    main: torch.dtype,
    comm: torch.dtype,
    transport: str,
) -> None:
    for found in ranks.run(distances, inner, outer, compute, main, comm, transport):
        assert max(found.values()) == 0, found
