"""Losses per token: gradients are summed, and the caller divides once by all tokens of the cycle.

Ranks and microbatches have unequal numbers of tokens, so that a mean over ranks would be another
one than the mean over tokens.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from mfsdp_core import (
    MixedPrecisionPolicy,
    clip_grad_norm_,
    fully_shard_model,
    fully_shard_optimizer,
)
from oracle.cycles import gathered, named
from oracle.models import TOYS, WIDTH, build
from oracle.ranks import mesh, on_two_axes
from oracle.reference import compare
from oracle.sharded import STRATEGIES

pytestmark = pytest.mark.on_ranks

NAME, WORLD, MICROBATCHES, CLIP = "linear_stack", 4, 2, 0.05
PAIRS: list[tuple[str, str | None]] = [
    *((inner, None) for inner in STRATEGIES),
    *((inner, "no_shard") for inner in STRATEGIES),
    *((inner, "optim") for inner in STRATEGIES[1:]),
]


def arguments(outer: str | None) -> dict[str, Any]:
    if outer is None:
        return {"device_mesh": mesh(WORLD), "dp_shard_dim": "dp"}
    return on_two_axes(outer)


def tokens_of(rank: int, microbatch: int, cycle: int) -> Tensor:
    """[tokens, features]: 1 to 12 of them."""
    count = 1 + 3 * rank + (2 * microbatch + cycle) % 3
    generator = torch.Generator().manual_seed(1_000_003 * cycle + 1_009 * rank + microbatch + 1)
    return torch.randn(count, WIDTH, generator=generator, dtype=torch.float64)


def summed_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    return model(tokens).square().sum()


def twin_step(twin: nn.Module, optimizer: torch.optim.Optimizer, cycle: int) -> float:
    """One step on the mean over all tokens of all ranks and microbatches; the norm before it."""
    batches = [tokens_of(rank, j, cycle) for rank in range(WORLD) for j in range(MICROBATCHES)]
    total = sum(len(tokens) for tokens in batches)
    for tokens in batches:
        (summed_loss(twin, tokens) / total).backward()
    norm = float(nn.utils.clip_grad_norm_(twin.parameters(), CLIP))
    optimizer.step()
    optimizer.zero_grad()
    return norm


def compare_training(inner: str, outer: str | None, *, finish_first: bool, **more: Any) -> None:
    """Norms and weights of three steps; every rank scales by its own count of all tokens."""
    model: Any = fully_shard_model(
        build(NAME, torch.float64),
        fsdp_unit_modules=list(TOYS[NAME].units),
        zero_dp_strategy=inner,
        calculate_per_token_loss=True,
        sync_model_each_microbatch=False,
        mixed_precision_policy=MixedPrecisionPolicy(main_params_dtype=torch.float64),
        **arguments(outer),
        **more,
    )
    optimizer = fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=0.01))
    twin = build(NAME, torch.float64)
    reference = torch.optim.AdamW(twin.parameters(), lr=0.01)
    for cycle in range(3):
        total = torch.zeros(())
        for j in range(MICROBATCHES):
            tokens = tokens_of(dist.get_rank(), j, cycle)
            total += len(tokens)
            with model.sync() if j == MICROBATCHES - 1 and finish_first else model.no_sync():
                summed_loss(model, tokens).backward()
        dist.all_reduce(total)
        model.scale_gradients(1 / float(total))
        norm = float(clip_grad_norm_(model, CLIP))
        optimizer.step()
        optimizer.zero_grad()
        expected = twin_step(twin, reference, cycle)
        assert abs(norm / expected - 1) < 1e-10, f"norm {norm}, expected {expected}"
    wanted = {key: p.detach() for key, p in twin.named_parameters()}
    compare(gathered(dict(named(model))), wanted, 1e-10)


@pytest.mark.sample
@pytest.mark.parametrize(("inner", "outer"), PAIRS)
def test_three_steps_on_unequal_token_counts_equal_one_process(
    inner: str, outer: str | None
) -> None:
    compare_training(inner, outer, finish_first=True)


@pytest.mark.parametrize("inner", STRATEGIES)
def test_scaling_finishes_what_the_cycle_still_owes(inner: str) -> None:
    # Nobody marks the last microbatch: un-reduced gradients must not be what is scaled.
    compare_training(inner, "no_shard", finish_first=False)


@pytest.mark.parametrize(("inner", "outer"), [("optim", None), ("optim_grads_params", "optim")])
def test_a_sum_per_token_wins_over_means_in_collectives(inner: str, outer: str | None) -> None:
    compare_training(inner, outer, finish_first=True, average_in_collective=True)
