"""Models, passes and calls that a simple implementation gets wrong; each was found by trying."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import nn

from mfsdp_core import (
    MixedPrecisionPolicy,
    clip_grad_norm_,
    fully_shard_optimizer,
)
from oracle.beside_torch import beside, own_batch
from oracle.models import Block
from oracle.reference import compare
from oracle.sharded import STRATEGIES, shard

pytestmark = pytest.mark.on_ranks

NAME = "aligned_stack"


class NamedRoot(nn.Module):
    """A unit whose attribute is called `root`, beside parameters that the real root owns."""

    def __init__(self) -> None:
        super().__init__()
        self.root = Block(width=8, hidden=16)
        self.other = Block(width=8, hidden=16)
        self.plain = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.plain(self.other(self.root(x)))


class Shared(nn.Module):
    """One module instance inside two units, and another inside a unit and the root."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width=8, hidden=16) for _ in range(2))
        self.blocks[1].up = self.blocks[0].up
        self.norm = self.blocks[0].norm

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


@dataclasses.dataclass
class Output:
    value: torch.Tensor


class Merged(Block):
    """A unit that multiplies two weights, changes its input in place and returns a dataclass."""

    def __init__(self) -> None:
        super().__init__(width=8, hidden=16)
        self.low = nn.Parameter(torch.ones(8, 2) / 4)
        self.high = nn.Parameter(torch.ones(2, 8) / 4)

    def forward(self, x: torch.Tensor) -> Output:
        merged = x.clone() @ (self.low @ self.high)
        x += super().forward(merged)
        return Output(x)


class WeightsFromWeights(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Merged() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.clone().requires_grad_() * 1
        for block in self.blocks:
            x = block(x).value
        return x


@pytest.mark.sample
@pytest.mark.parametrize("kind", [NamedRoot, Shared, WeightsFromWeights])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_unusual_modules_get_the_gradient_of_one_process(strategy: str, kind: Any) -> None:
    """Two cycles, auto-sync on."""
    pair = beside(kind, (strategy, "storage_resize"))
    for cycle in range(2):
        pair.backward(own_batch(cycle, 3, 8))
        pair.compare_gradients()
        pair.zero_grad()


@pytest.mark.parametrize("strategy", ["no_shard", "optim_grads_params"])
def test_what_the_caller_did_to_a_cast_gradient_survives_the_step(strategy: str) -> None:
    """A clipped SGD step, with `.grad` a cast copy, is as long and goes where it should."""
    toy = shard(NAME, strategy, 2, torch.bfloat16, mixed_precision_policy=MixedPrecisionPolicy())
    optimizer = fully_shard_optimizer(torch.optim.SGD(toy.model.parameters(), lr=1.0))
    for cycle in range(2):
        toy.run_cycle(1, cycle)
        if cycle == 0:  # the weights move between cycles
            toy.compare_gradient(1, cycle, relative=1e-2)
        before = toy.full_parameters()
        gradient = toy.full_gradient()
        clip_grad_norm_(toy.model, 1e-3)
        optimizer.step()
        optimizer.zero_grad()
        moved = {key: before[key] - value for key, value in toy.full_parameters().items()}
        norm = torch.stack([value.norm() for value in gradient.values()]).norm()
        scaled = {key: value * (1e-3 / norm) for key, value in gradient.items()}
        compare(moved, scaled, 1e-2)
    length = float(torch.stack([value.norm() for value in moved.values()]).norm())
    assert length == pytest.approx(1e-3, rel=1e-3)
