"""Toy models, each with one property that a sharded implementation gets wrong easily.

Every model takes one tensor, `[batch, features]` or `[batch, channels, height, width]`, and is
built with weights that depend on the seed alone. Few of the sizes divide by 2 or 4.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.testing.toy_models import (
    VOCABULARY,
    Frozen,
    Recomputed,
    Rooted,
    Stack,
    Tied,
    Twice,
    Unused,
    generator_of,
)
from bench.testing.toy_models import build as draw
from bench.testing.units import WIDTH, Block


class TwoLinears(nn.Module):
    """A residual unit of two plain weights: [..., 8] to the same shape."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(torch.relu(self.first(x)))


class Branched(Block):
    """A unit with a branch that may be left out: [..., 8] to the same shape."""

    def __init__(self) -> None:
        super().__init__(width=8, hidden=16, branched=True)


class Lone(nn.Module):
    """A unit of one weight of two rows, made by `layer(columns, rows, bias=)`."""

    def __init__(self, layer: Callable[..., nn.Module]) -> None:
        super().__init__()
        self.few = layer(32, 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.few(x).sum(-1, keepdim=True)


class Chain(nn.Module):
    """Three units of one size and a head: [..., 8] to [..., outputs]."""

    def __init__(self, outputs: int = 8) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width=8, hidden=16) for _ in range(3))
        self.head = nn.Linear(8, outputs)

    def forward(self, x: Tensor, path: Sequence[int] = (0, 1, 2)) -> Tensor:
        """path: of the blocks, in the order in which they run."""
        for index in path:
            x = self.blocks[index](x)
        return self.head(x)


class ConvBlock(nn.Module):
    """Row sizes of 27, 72 and 64 elements in one unit: no common multiple below 1728."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3)
        self.second = nn.Conv2d(8, 4, 3)
        self.linear = nn.Linear(64, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.gelu(self.second(F.gelu(self.first(x))))
        return self.linear(x.flatten(1))


class ConvLinear(nn.Module):
    """One unit that mixes convolutions and a linear layer: row alignment."""

    def __init__(self) -> None:
        super().__init__()
        self.features = ConvBlock()
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x).tanh())


class AlignedStack(nn.Module):
    """On two ranks each of the three units, and the root, is one bucket without padding."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width=8, hidden=16) for _ in range(3))
        self.last = nn.Linear(8, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = F.pad(x, (1, 1))
        for block in self.blocks:
            x = block(x)
        return self.last(x)


class Mixer(nn.Module):
    """A unit that is smaller than a `Block`, with a convolution along the sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.along = nn.Conv1d(WIDTH, WIDTH, 3, padding=1, groups=WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.out(self.along(x.transpose(-1, -2)).transpose(-1, -2).tanh())


class UnequalUnits(nn.Module):
    """Units of three sizes in turns, one of them once only, and an output tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList((Block(), Mixer(), Block(hidden=17), Mixer(), Block(), Mixer()))
        self.output = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.output.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.output(x)


@dataclass(frozen=True)
class Toy:
    """A model, the classes that are its units, and the input of one microbatch."""

    model: Callable[[], nn.Module]
    units: tuple[type[nn.Module], ...]
    inputs: Callable[[torch.Generator, torch.dtype], Tensor]


def _features(generator: torch.Generator, dtype: torch.dtype) -> Tensor:
    return torch.randn(4, WIDTH, generator=generator, dtype=torch.float64).to(dtype)


def _tokens(generator: torch.Generator, dtype: torch.dtype) -> Tensor:
    return torch.randint(VOCABULARY, (2, 5), generator=generator)


def _images(generator: torch.Generator, dtype: torch.dtype) -> Tensor:
    return torch.randn(2, 3, 8, 8, generator=generator, dtype=torch.float64).to(dtype)


TOYS: dict[str, Toy] = {
    "linear_stack": Toy(partial(Stack, features=True), (Block,), _features),
    "tied_embedding": Toy(Tied, (Block,), _tokens),
    "frozen": Toy(partial(Frozen, features=True), (Block,), _features),
    "root_owned": Toy(partial(Rooted, features=True), (Block,), _features),
    "conv_linear": Toy(ConvLinear, (ConvBlock,), _images),
    "used_twice": Toy(partial(Twice, features=True), (Block,), _features),
    "aligned_stack": Toy(AlignedStack, (Block,), _features),
    "recomputed": Toy(partial(Recomputed, features=True), (Block,), _features),
    "unequal_units": Toy(UnequalUnits, (Block, Mixer), _tokens),
    "unused_parameter": Toy(partial(Unused, features=True), (Block,), _features),
}


def build(name: str, dtype: torch.dtype = torch.float32, seed: int = 7) -> nn.Module:
    """The model with weights drawn in fp64 from `seed`, rounded to `dtype`: equal on all ranks."""
    return draw(TOYS[name].model, dtype, seed, 0.3)


def batch(name: str, rank: int, microbatch: int, dtype: torch.dtype, cycle: int = 0) -> Tensor:
    """Input of one microbatch: different for every rank, microbatch and cycle."""
    return TOYS[name].inputs(generator_of(rank, microbatch, cycle), dtype)


def loss(output: Tensor) -> Tensor:
    """A scalar that depends on every output element, with curvature."""
    weights = torch.linspace(0.5, 1.5, output.numel(), dtype=output.dtype, device=output.device)
    weights = weights.view_as(output)
    return (weights * output.float().square().to(output.dtype) + weights * output).mean()
