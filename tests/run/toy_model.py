"""A model as somebody else writes it: it maps vectors to vectors, and makes its own batches."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from bench.models.factory import UserModel
from bench.spec import ResolvedRun

WIDTH = 12


class Block(nn.Module):
    """The unit that sharding engines gather as one."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 2 * WIDTH)
        self.second = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.second(torch.tanh(self.first(x)))
        return out


class Regression(nn.Module):
    """Called with inputs and targets, float [rows, WIDTH]; returns the mean squared error."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        x = inputs
        for block in self.blocks:
            x = block(x)
        return nn.functional.mse_loss(x, targets)


def make_batch(samples: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Sample n is a vector that depends on n alone; its target is half of it, reversed."""
    generators = [torch.Generator().manual_seed(number) for number in samples]
    inputs = torch.stack([torch.randn(WIDTH, generator=one) for one in generators])
    return inputs, inputs.flip(1) / 2


def build(_resolved: ResolvedRun, device: torch.device) -> UserModel:
    """The factory that `model.factory: toy_model:build` names."""
    return UserModel(Regression().to(device), (Block,), make_batch)
