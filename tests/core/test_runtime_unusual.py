"""Models, passes and calls that a simple implementation gets wrong; each was found by trying."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from mfsdp_core import (
    MixedPrecisionPolicy,
    clip_grad_norm_,
    fully_shard_optimizer,
)
from oracle.beside_torch import beside, own_batch
from oracle.models import Block, loss
from oracle.ranks import RankPool
from oracle.reference import expected_gradient, relative_difference
from oracle.sharded import STRATEGIES, shard

pytestmark = pytest.mark.processes

NAME = "aligned_stack"


def bf16_gradients_of_two_cycles(strategy: str) -> tuple[float, list[float]]:
    """Length of a clipped SGD step, and gradient errors of two cycles with `.grad` a cast copy."""
    toy = shard(NAME, strategy, 2, torch.bfloat16, mixed_precision_policy=MixedPrecisionPolicy())
    optimizer = fully_shard_optimizer(torch.optim.SGD(toy.model.parameters(), lr=1.0))
    errors = []
    for cycle in range(2):
        toy.run_cycle(1, cycle)
        expected = expected_gradient(NAME, 2, 1, torch.bfloat16, cycle)
        if cycle == 0:  # the weights move between cycles
            errors.append(relative_difference(toy.full_gradient(), expected))
        before = toy.full_parameters()
        gradient = toy.full_gradient()
        clip_grad_norm_(toy.model, 1e-3)
        optimizer.step()
        optimizer.zero_grad()
        moved = {key: before[key] - value for key, value in toy.full_parameters().items()}
        length = torch.stack([value.norm() for value in moved.values()]).norm()
        norm = torch.stack([value.norm() for value in gradient.values()]).norm()
        scaled = {key: value * (1e-3 / norm) for key, value in gradient.items()}
        errors.append(relative_difference(moved, scaled))
    return float(length), errors


def half_a_model_under_the_name_root(strategy: str) -> float:
    """A unit whose attribute is called `root`, beside parameters that the real root owns."""

    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.root = Block(width=8, hidden=16)
            self.other = Block(width=8, hidden=16)
            self.plain = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.plain(self.other(self.root(x)))

    return error_against_one_process(Named, strategy)


def module_shared_by_units(strategy: str) -> float:
    """One module instance inside two units, and another inside a unit and the root."""

    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Block(width=8, hidden=16) for _ in range(2))
            self.blocks[1].up = self.blocks[0].up
            self.norm = self.blocks[0].norm

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = block(x)
            return self.norm(x)

    return error_against_one_process(Shared, strategy)


def weights_from_weights(strategy: str) -> float:
    """A unit that multiplies two weights, changes its input in place and returns a dataclass."""

    @dataclasses.dataclass
    class Output:
        value: torch.Tensor

    class Merged(Block):
        def __init__(self) -> None:
            super().__init__(width=8, hidden=16)
            self.low = nn.Parameter(torch.ones(8, 2) / 4)
            self.high = nn.Parameter(torch.ones(2, 8) / 4)

        def forward(self, x: torch.Tensor) -> Output:
            merged = x.clone() @ (self.low @ self.high)
            x += super().forward(merged)
            return Output(x)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Merged() for _ in range(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x.clone().requires_grad_() * 1
            for block in self.blocks:
                x = block(x).value
            return x

    return error_against_one_process(Model, strategy)


def called_twice_in_nested_graphs(strategy: str) -> float:
    """One unit, twice under reentrant checkpointing, in the only microbatch of a cycle."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Block(width=8, hidden=16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x.clone().requires_grad_()
            for _ in range(2):
                x = checkpoint(self.block, x, use_reentrant=True)
            return x

    return error_against_one_process(Twice, strategy)


def error_against_one_process(factory: Any, strategy: str) -> float:
    """Largest relative gradient error on two ranks, two cycles, auto-sync on."""
    pair, worst = beside(factory, (strategy, "storage_resize")), 0.0
    for cycle in range(2):
        for module in pair.both:
            loss(module(own_batch(cycle, 3, 8))).backward()
        worst = max(worst, pair.worst_gradient())
        pair.zero_grad()
    return worst


def after_a_failed_pass() -> tuple[bool, float, bool]:
    """Backward of a second forward after the first one's backward raised; shards after a failed
    forward; then a retry without zero_grad."""
    toy = shard(NAME, 2, 2, torch.float64)
    first, second = toy.forward(0), toy.forward(1)

    def fail(*_: Any) -> None:
        raise ArithmeticError

    hook = toy.model.module.blocks[1].register_forward_pre_hook(fail)
    with pytest.raises(ArithmeticError):
        toy.forward()
    hook.remove()
    shown = all(hasattr(p.data, "device_mesh") for p in toy.model.parameters())
    first.register_hook(fail)
    with pytest.raises(ArithmeticError):
        first.backward()
    second.backward()
    toy.model.finish_grad_sync()
    gradients = all(p.grad is not None for p in toy.model.parameters())
    toy.model.zero_grad_buffer()
    toy.run_cycle(2, cycle=1)
    expected = expected_gradient(NAME, 2, 2, torch.float64, 1)
    return shown, relative_difference(toy.full_gradient(), expected), gradients


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_what_the_caller_did_to_a_cast_gradient_survives_the_step(
    ranks: RankPool, strategy: str
) -> None:
    for length, errors in ranks.run(bf16_gradients_of_two_cycles, strategy):
        assert length == pytest.approx(1e-3, rel=1e-3)
        assert max(errors) < 1e-2


@pytest.mark.sample
@pytest.mark.parametrize(
    "case",
    [
        half_a_model_under_the_name_root,
        module_shared_by_units,
        weights_from_weights,
        called_twice_in_nested_graphs,
    ],
)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_unusual_modules_get_the_gradient_of_one_process(
    ranks: RankPool, strategy: str, case: Any
) -> None:
    assert max(ranks.run(case, strategy)) < 1e-12


def test_a_failed_pass_is_forgotten_by_whatever_comes_next(ranks: RankPool) -> None:
    for shown, error, gradients in ranks.run(after_a_failed_pass):
        assert shown
        assert gradients
        assert error < 1e-12
