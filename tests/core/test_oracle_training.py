"""Parameters after optimizer steps, gradient norm and clipping equal plain torch's."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
from torch import nn

from mfsdp_core import clip_grad_norm_, fully_shard_optimizer
from oracle import reference
from oracle.models import TOYS
from oracle.ranks import GROUP_SIZES
from oracle.sharded import STRATEGIES, shard

pytestmark = pytest.mark.on_ranks

STEPS, MICROBATCHES = 3, 2


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1)


def compare_training(
    name: str, strategy: str, group_size: int, clip_norm: float | None = None
) -> None:
    """Norms, and parameters after all steps."""
    toy = shard(name, strategy, group_size, torch.float64)
    wanted, norms = reference.train(
        name, group_size, MICROBATCHES, STEPS, adamw, clip_norm=clip_norm
    )
    optimizer = fully_shard_optimizer(adamw([p for p in toy.model.parameters() if p.requires_grad]))
    for step, expected in enumerate(norms):
        toy.run_cycle(MICROBATCHES, cycle=step)
        norm = float(clip_grad_norm_(toy.model, float("inf") if clip_norm is None else clip_norm))
        assert abs(norm / expected - 1) <= 1e-12, f"norm {norm}, expected {expected}"
        optimizer.step()
        optimizer.zero_grad()
    reference.compare(toy.full_parameters(), wanted, 1e-10)


def test_the_norm_of_no_gradients_is_a_zero_where_the_parameters_are() -> None:
    parameter = torch.nn.Parameter(torch.ones(2, device="meta"))
    assert clip_grad_norm_([parameter], 1.0).device == parameter.device


@pytest.mark.sample
@pytest.mark.parametrize(
    "group_size",
    [2, *(pytest.param(size, marks=pytest.mark.nightly) for size in GROUP_SIZES if size != 2)],
)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", TOYS)
def test_parameters_after_three_adamw_steps_equal_the_reference(
    name: str, strategy: str, group_size: int
) -> None:
    compare_training(name, strategy, group_size)


@pytest.mark.sample
@pytest.mark.parametrize("group_size", GROUP_SIZES)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", ["tied_embedding", "frozen"])
def test_gradient_norm_and_clipping_equal_torch_on_the_full_gradient(
    name: str, strategy: str, group_size: int
) -> None:
    compare_training(name, strategy, group_size, 0.05)


@pytest.mark.parametrize("is_whole", [True, False])
def test_clipping_finishes_a_gradient_that_nobody_has_marked_as_last(is_whole: bool) -> None:
    """Of a model, and of its parameters."""
    toy = shard("aligned_stack", "optim", 2, torch.float64)
    for j in range(3):
        toy.backward(j)
    norm = clip_grad_norm_(toy.model if is_whole else list(toy.model.parameters()), 0.5)
    expected = reference.expected_gradient("aligned_stack", 2, 3, torch.float64, 0)
    wanted = torch.stack([g.norm() for g in expected.values()]).norm()
    assert float(norm) == pytest.approx(float(wanted), rel=1e-12)
    clipped = {name: g * (0.5 / (wanted + 1e-6)) for name, g in expected.items()}
    reference.compare(toy.full_gradient(), clipped)
