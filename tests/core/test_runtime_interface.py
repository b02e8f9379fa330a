"""What users call beside forward and step: scaling, loading, broadcasting, fused gradients."""

from __future__ import annotations

import pytest
import torch

from mfsdp_core import (
    clip_grad_norm_,
)
from oracle.models import batch, build
from oracle.ranks import RankPool
from oracle.reference import expected_gradient, relative_difference
from oracle.sharded import STRATEGIES, shard

pytestmark = pytest.mark.processes

NAME = "aligned_stack"


def scaled_error(strategy: str, per_token: bool, in_collective: bool, factor: float) -> float:
    """Error of the gradient, times `factor` by scale_gradients, against `factor` x reference."""
    toy = shard(
        NAME,
        strategy,
        2,
        torch.float64,
        calculate_per_token_loss=per_token,
        average_in_collective=in_collective,
    )
    toy.run_cycle(2)
    toy.model.scale_gradients(factor)
    weight = factor * (2 if per_token else 1)
    expected = expected_gradient(NAME, 2, 2, torch.float64, 0)
    scaled = {name: gradient * weight for name, gradient in expected.items()}
    return relative_difference(toy.full_gradient(), scaled)


@pytest.mark.sample
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(("per_token", "in_collective"), [(True, False), (False, True)])
def test_gradients_are_averaged_as_asked_and_scaled_once(
    ranks: RankPool, strategy: str, per_token: bool, in_collective: bool
) -> None:
    errors = ranks.run(scaled_error, strategy, per_token, in_collective, 0.5)
    assert max(errors) < 1e-12


def clipped_without_a_mark(style: str) -> tuple[float, float, float]:
    """Norm of an accumulated gradient that nobody has finished, the reference's, and the error
    of the clipped gradient."""
    toy = shard(NAME, "optim", 2, torch.float64)
    for j in range(3):
        toy.backward(j)
    whole = style == "model"
    norm = clip_grad_norm_(toy.model if whole else list(toy.model.parameters()), 0.5)
    expected = expected_gradient(NAME, 2, 3, torch.float64, 0)
    wanted = torch.stack([g.norm() for g in expected.values()]).norm()
    clipped = {name: g * (0.5 / (wanted + 1e-6)) for name, g in expected.items()}
    error = relative_difference(toy.full_gradient(), clipped)
    return float(norm), float(wanted), error


@pytest.mark.parametrize("style", ["model", "parameters"])
def test_clipping_finishes_a_gradient_that_nobody_has_marked_as_last(
    ranks: RankPool, style: str
) -> None:
    for norm, wanted, error in ranks.run(clipped_without_a_mark, style):
        assert norm == pytest.approx(wanted, rel=1e-12)
        assert error < 1e-12


def frozen_outputs_after_loading(strategy: str) -> bool:
    """Whether a frozen weight that was loaded after a forward pass is what the next one uses."""
    toy = shard("frozen", strategy, 4)
    value = batch("frozen", 0, 0, torch.float32)
    with torch.no_grad():
        toy.model(value)
        wanted = build("frozen", seed=8)
        state = {f"module.{name}": value for name, value in wanted.state_dict().items()}
        toy.model.load_state_dict(state)
        return torch.equal(toy.model(value), wanted(value))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_loading_reaches_the_compute_copies_of_frozen_weights(
    ranks: RankPool, strategy: str
) -> None:
    assert ranks.run(frozen_outputs_after_loading, strategy) == [True] * 4
