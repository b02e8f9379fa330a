"""Historical bugs of gradient reduction, each with the smallest case that shows it.

The weight's gradient is its input, so the expected numbers are worked out by hand: rank r sends
`10 * (j + 1) + r + 1` on microbatch j into every element.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from mfsdp_core import MixedPrecisionPolicy, fully_shard_model, gather_full
from oracle.models import KnownGradient
from oracle.ranks import RankPool, mesh

pytestmark = pytest.mark.processes


def gradients(
    strategy: str,
    group_size: int,
    microbatches: int,
    signal_last: bool = True,
    comm: torch.dtype = torch.float32,
) -> list[float]:
    """Distinct values of the full gradient after a cycle."""
    model: Any = fully_shard_model(
        nn.Sequential(KnownGradient()),
        device_mesh=mesh(group_size),
        dp_shard_dim="dp",
        fsdp_unit_modules=[KnownGradient],
        zero_dp_strategy=strategy,
        sync_model_each_microbatch=False,
        mixed_precision_policy=MixedPrecisionPolicy(grad_comm_dtype=comm),
    )
    rank = mesh(group_size).get_local_rank("dp")
    for j in range(microbatches):
        contribution = torch.full((4, 2), float(10 * (j + 1) + rank + 1))
        if signal_last and j < microbatches - 1:
            with model.no_sync():
                model(contribution).backward()
        else:
            model(contribution).backward()
    model.finish_grad_sync()
    (parameter,) = model.parameters()
    return sorted(set(gather_full(parameter.grad).flatten().tolist()))


@pytest.mark.parametrize("comm", [torch.float32, torch.bfloat16], ids=["in-place", "bucket"])
@pytest.mark.parametrize("strategy", ["no_shard", "optim"])
def test_r1_a_reduced_gradient_replaces_the_own_contribution(
    ranks: RankPool, strategy: str, comm: torch.dtype
) -> None:
    # Two ranks, one microbatch: (11 + 12) / 2. Added, rank 0 would see 11 + 11.5 in its slice.
    # Only where the wire has another dtype is there a bucket to land from.
    assert ranks.run(gradients, strategy, 2, 1, True, comm) == [[11.5]] * 4


@pytest.mark.parametrize(
    ("microbatches", "expected"), [(1, 11.5), (3, 11.5 + 21.5 + 31.5)], ids=["k=1", "k=3"]
)
@pytest.mark.parametrize("strategy", ["optim_grads", "optim_grads_params"])
def test_r2_what_is_scaled_is_the_input_of_the_reduction_not_the_accumulator(
    ranks: RankPool, strategy: str, microbatches: int, expected: float
) -> None:
    assert ranks.run(gradients, strategy, 2, microbatches) == [[expected]] * 4


@pytest.mark.parametrize("strategy", ["no_shard", "optim", "optim_grads", "optim_grads_params"])
def test_r3_a_group_of_one_accumulates_without_growing(ranks: RankPool, strategy: str) -> None:
    assert ranks.run(gradients, strategy, 1, 4) == [[11.0 + 21.0 + 31.0 + 41.0]] * 4


@pytest.mark.sample
@pytest.mark.parametrize("strategy", ["no_shard", "optim"])
@pytest.mark.parametrize("microbatches", [1, 2])
def test_r21_finish_reduces_what_nobody_marked_as_last(
    ranks: RankPool, strategy: str, microbatches: int
) -> None:
    expected = sum([11.5, 21.5][:microbatches])
    assert ranks.run(gradients, strategy, 2, microbatches, False) == [[expected]] * 4
