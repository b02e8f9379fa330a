"""A mixture of experts whose tokens go where their position says, and its single-process twin.

Every rank owns some of the experts. Instead of an all-to-all, tokens of all ranks of an
expert-parallel group are gathered, each rank runs its own experts on what is meant for them, and
the results are summed; gradients take the way back. An expert's gradient on its owner is therefore
the sum over the losses of the whole group, as under a real exchange.

The twin has all experts and no exchange: with D data-parallel ranks the gradient that must reach
the optimizer is the mean over their losses, for experts as for everything else.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from bench.testing.toy_models import generator_of

EXPERTS = 4
WIDTH = 6
#: Expert of each of a rank's tokens: loads differ, and every expert has some.
ROUTE = torch.tensor([0, 1, 3, 1, 2, 0])


class AllReduce(torch.autograd.Function):
    """The sum over ranks, forward and backward."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        total = own.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return AllReduce.apply(gradient, ctx.group), None


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 5)
        self.down = nn.Linear(5, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class MoeLayer(nn.Module):
    """The unit: dense and expert parameters side by side. `group` None owns all experts."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        super().__init__()
        self.group = group
        self.mix = nn.Linear(WIDTH, WIDTH)
        size, rank = (1, 0) if group is None else (group.size(), group.rank())
        own = range(rank * EXPERTS // size, (rank + 1) * EXPERTS // size)
        self.experts = nn.ModuleDict({str(e): Expert() for e in own})

    def forward(self, x: Tensor) -> Tensor:
        mixed = self.mix(x)
        tokens = mixed
        if self.group is not None:
            parts = [torch.zeros_like(mixed)] * self.group.size()
            parts[self.group.rank()] = mixed
            tokens = AllReduce.apply(torch.cat(parts), self.group)
        route = ROUTE.repeat(len(tokens) // len(ROUTE))
        results = torch.zeros_like(tokens)
        for name, expert in self.experts.items():
            chosen = (route == int(name)).nonzero()[:, 0]
            results = results.index_add(0, chosen, expert(tokens[chosen]))
        if self.group is not None:
            total = AllReduce.apply(results, self.group)
            results = total.chunk(self.group.size())[self.group.rank()]
        return x + results


class Moe(nn.Module):
    """Two layers of experts and a dense head."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(MoeLayer(group) for _ in range(2))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def build_moe(group: dist.ProcessGroup | None = None) -> Moe:
    """fp64 weights that depend on their names alone: an expert has the same ones on any rank."""
    model = Moe(group).double()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            seed = sum(ord(c) * 31**i for i, c in enumerate(name)) % (1 << 30)
            drawn = torch.randn(
                parameter.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
            )
            parameter.copy_(0.4 * drawn)
    return model


def tokens_of(rank: int, microbatch: int, cycle: int = 0) -> Tensor:
    """[tokens, width] of one data-parallel rank."""
    generator = generator_of(rank, microbatch, cycle)
    return torch.randn(len(ROUTE), WIDTH, generator=generator, dtype=torch.float64)
