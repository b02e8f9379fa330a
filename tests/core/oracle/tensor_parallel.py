"""A small language model under torch's tensor parallelism, and its single-process twin.

`plain`: norms see whole activations and are not parallelised. `sequence`: between the linears the
sequence is cut as well, so that the norms' weights are replicated DTensors whose gradients come out
of autograd as partial sums. The embedding's 11 rows do not divide by two.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from bench.testing.toy_models import build, generator_of

VOCABULARY, WIDTH, HIDDEN, CLASSES = 11, 6, 10, 8


class TpBlock(nn.Module):
    """The unit."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class TpModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(TpBlock() for _ in range(2))
        self.head = nn.Linear(WIDTH, CLASSES, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def build_twin() -> nn.Module:
    """fp64, the same on every rank."""
    return build(TpModel, torch.float64, 11, 0.4)


def build_parallel(axis: DeviceMesh, variant: str) -> nn.Module:
    """The twin, cut over `axis` by torch."""
    model: Any = build_twin()
    between = Shard(1) if variant == "sequence" else Replicate()
    plan: dict[str, object] = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
        "head": ColwiseParallel(input_layouts=between, output_layouts=Replicate()),
    }
    for number in range(len(model.blocks)):
        plan[f"blocks.{number}.up"] = ColwiseParallel(input_layouts=between)
        plan[f"blocks.{number}.down"] = RowwiseParallel(output_layouts=between)
        if variant == "sequence":
            plan[f"blocks.{number}.norm"] = SequenceParallel(use_local_output=True)
    return parallelize_module(model, axis, plan)


def tokens_of(rank: int, microbatch: int, cycle: int = 0) -> Tensor:
    """[batch, sequence] of one data-parallel rank; equal along the tensor-parallel axis."""
    return torch.randint(VOCABULARY, (2, 4), generator=generator_of(rank, microbatch, cycle))
