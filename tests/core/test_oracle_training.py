"""Parameters after optimizer steps, gradient norm and clipping equal plain torch's."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
from torch import nn

from mfsdp_core import clip_grad_norm_, fully_shard_optimizer
from oracle import reference
from oracle.models import TOYS
from oracle.ranks import GROUP_SIZES, RankPool
from oracle.sharded import STRATEGIES, shard

pytestmark = pytest.mark.processes

STEPS, MICROBATCHES = 3, 2


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1)


def training_errors(
    name: str, strategy: str, group_size: int, clip_norm: float | None
) -> tuple[float, float]:
    """Relative difference of the parameters after all steps, and largest one of the norms."""
    toy = shard(name, strategy, group_size, torch.float64)
    trainable = [p for p in toy.model.parameters() if p.requires_grad]
    optimizer = fully_shard_optimizer(adamw(trainable))
    norms = []
    for step in range(STEPS):
        toy.run_cycle(MICROBATCHES, cycle=step)
        bound = float("inf") if clip_norm is None else clip_norm
        norms.append(float(clip_grad_norm_(toy.model, bound)))
        optimizer.step()
        optimizer.zero_grad()
    expected, expected_norms = reference.train(
        name, group_size, MICROBATCHES, STEPS, adamw, clip_norm=clip_norm
    )
    worst_norm = max(abs(a / b - 1) for a, b in zip(norms, expected_norms, strict=True))
    return reference.relative_difference(toy.full_parameters(), expected), worst_norm


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
    ranks: RankPool, name: str, strategy: str, group_size: int
) -> None:
    for parameters, _ in ranks.run(training_errors, name, strategy, group_size, None):
        assert parameters <= 1e-10


@pytest.mark.sample
@pytest.mark.parametrize("group_size", GROUP_SIZES)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", ["tied_embedding", "frozen"])
def test_gradient_norm_and_clipping_equal_torch_on_the_full_gradient(
    ranks: RankPool, name: str, strategy: str, group_size: int
) -> None:
    for parameters, norm in ranks.run(training_errors, name, strategy, group_size, 0.05):
        assert norm <= 1e-12
        assert parameters <= 1e-10


def clipped_without_a_mark(style: str) -> tuple[float, float, float]:
    """Norm of an accumulated gradient that nobody has finished, the reference's, and the error
    of the clipped gradient."""
    toy = shard("aligned_stack", "optim", 2, torch.float64)
    for j in range(3):
        toy.backward(j)
    whole = style == "model"
    norm = clip_grad_norm_(toy.model if whole else list(toy.model.parameters()), 0.5)
    expected = reference.expected_gradient("aligned_stack", 2, 3, torch.float64, 0)
    wanted = torch.stack([g.norm() for g in expected.values()]).norm()
    clipped = {name: g * (0.5 / (wanted + 1e-6)) for name, g in expected.items()}
    error = reference.relative_difference(toy.full_gradient(), clipped)
    return float(norm), float(wanted), error


@pytest.mark.parametrize("style", ["model", "parameters"])
def test_clipping_finishes_a_gradient_that_nobody_has_marked_as_last(
    ranks: RankPool, style: str
) -> None:
    for norm, wanted, error in ranks.run(clipped_without_a_mark, style):
        assert norm == pytest.approx(wanted, rel=1e-12)
        assert error < 1e-12
