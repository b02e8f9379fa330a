"""Gradients handed over as `decoupled_grad`, in the dtype in which they were accumulated."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mfsdp_core import MixedPrecisionPolicy, clip_grad_norm_, fully_shard_optimizer
from oracle.ranks import RankPool
from oracle.reference import expected_gradient, relative_difference, train
from oracle.sharded import STRATEGIES, Sharded, shard

pytestmark = pytest.mark.processes

NAME = "aligned_stack"


class ReadsDecoupled(torch.optim.Optimizer):
    """SGD on `decoupled_grad`, whatever its dtype. Not our code: the reader's side of the deal."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # noqa: ARG002
        for group in self.param_groups:
            for parameter in group["params"]:
                gradient = parameter.decoupled_grad.to_local().to(parameter.dtype)
                parameter.to_local().add_(gradient, alpha=-group["lr"])


def decoupled(strategy: str, main_grads: torch.dtype, **arguments: Any) -> Sharded:
    policy = MixedPrecisionPolicy(torch.float32, main_grads, main_grads)
    return shard(
        NAME,
        strategy,
        2,
        mixed_precision_policy=policy,
        use_decoupled_grad=True,
        **arguments,
    )


def handed_over(strategy: str, main_grads: torch.dtype) -> dict[str, Any]:
    """What an optimizer finds after one cycle, and after the next one has begun."""
    toy = decoupled(strategy, main_grads)
    resting = toy.model.ledger.bytes_by_category()
    toy.run_cycle(2)
    found = dict(toy.parameters())
    after = toy.model.ledger.bytes_by_category()
    coupled = {name: p.grad for name, p in found.items()}
    shards = {name: p.decoupled_grad for name, p in found.items()}
    whole = toy._joined(shards)
    toy.model.zero_grad_buffer()
    return {
        "grad": [value for value in coupled.values() if value is not None],
        "dtypes": {value.dtype for value in shards.values()},
        "error": relative_difference(whole, expected_gradient(NAME, 2, 2, torch.float32, 0)),
        "allocated": {key: after[key] - resting[key] for key in after if key != "gradients"},
        "afterwards": [p.decoupled_grad for p in found.values() if p.decoupled_grad is not None],
    }


@pytest.mark.sample
@pytest.mark.parametrize("main_grads", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_gradient_arrives_in_its_own_dtype_and_without_a_copy(
    ranks: RankPool, strategy: str, main_grads: torch.dtype
) -> None:
    for found in ranks.run(handed_over, strategy, main_grads):
        assert not found["grad"]
        assert found["dtypes"] == {main_grads}
        assert found["error"] < (1e-6 if main_grads is torch.float32 else 1e-2)
        assert not any(found["allocated"].values()), found["allocated"]
        assert not found["afterwards"]


def trained(strategy: str, clip_norm: float) -> tuple[dict[str, torch.Tensor], list[float]]:
    toy = shard(NAME, strategy, 2, torch.float64, use_decoupled_grad=True)
    optimizer = fully_shard_optimizer(ReadsDecoupled(toy.model.parameters(), lr=0.1))
    norms = []
    for cycle in range(3):
        toy.run_cycle(2, cycle)
        norms.append(float(clip_grad_norm_(toy.model, clip_norm)))
        optimizer.step()
        optimizer.zero_grad()
    return toy.full_parameters(), norms


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_training_and_clipping_on_decoupled_gradients_follow_the_reference(
    ranks: RankPool, strategy: str
) -> None:
    def sgd(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.1)

    expected, norms = train(NAME, 2, 2, 3, sgd, clip_norm=0.05)
    for found, found_norms in ranks.run(trained, strategy, 0.05):
        assert found_norms == pytest.approx(norms, rel=1e-12)
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-12, atol=1e-12)
