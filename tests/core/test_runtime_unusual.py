"""Models, passes and calls that a simple implementation gets wrong; each was found by trying."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import nn

from oracle.beside_torch import beside, own_batch
from oracle.models import Block
from oracle.sharded import STRATEGIES

pytestmark = pytest.mark.on_ranks


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
