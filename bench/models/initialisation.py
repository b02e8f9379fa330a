"""Initial values that depend on (seed, parameter name) alone.

One generator per parameter: a rank may build the parameters in any order, or only some of them, and
still hold what every other rank and engine holds. Drawn on the CPU because device generators give
other numbers.
"""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor, nn

STANDARD_DEVIATION = 0.02
_RESIDUAL_OUTPUTS = ("attention.output.weight", "feed_forward.down.weight")


def initialise(model: nn.Module, layers: int, seed: int) -> None:
    """Fill every parameter of `model` in place; a tied parameter is filled once."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(initial_value(name, parameter.shape, layers=layers, seed=seed))


def initial_value(name: str, shape: torch.Size, *, layers: int, seed: int) -> Tensor:
    """FP32 value of one parameter on the CPU.

    Norm weights are one; all others normal(0, 0.02), where projections that write to the residual
    stream are scaled by 1/sqrt(2 * layers), so that its variance does not grow with depth (GPT-2).
    """
    if len(shape) == 1:
        return torch.ones(shape)
    scale = 1 / math.sqrt(2 * layers) if name.endswith(_RESIDUAL_OUTPUTS) else 1.0
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    return torch.empty(shape).normal_(0.0, STANDARD_DEVIATION * scale, generator=generator)
