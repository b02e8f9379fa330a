"""Initial values that depend on (seed, parameter name) alone.

One generator per parameter: a rank may build the parameters in any order, or only some of them, and
still hold what every other rank and engine holds. Drawn on the CPU because device generators give
other numbers.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor

STANDARD_DEVIATION = 0.02
_RESIDUAL_OUTPUTS = (
    "attention.output.weight",
    "feed_forward.down.weight",
    "mamba.output.weight",
    "experts.down",
    "experts.shared.down.weight",
)
_STEP_SIZES = (1e-3, 1e-1)
_DECAY_RATES = (1.0, 16.0)


def initial_value(name: str, shape: torch.Size, *, residual_writes: int, seed: int) -> Tensor:
    """FP32 value of one parameter on the CPU.

    Norm weights are one; the vectors of a Mamba block follow their own rules; all others
    normal(0, 0.02), where the `residual_writes` projections that write to the residual stream are
    scaled by 1/sqrt(residual_writes), so that its variance does not grow with depth (GPT-2).
    """
    if len(shape) == 1:
        rule = _VECTORS.get(name.rpartition(".")[2], torch.ones)
        return rule(shape[0])
    scale = STANDARD_DEVIATION
    if name.endswith(_RESIDUAL_OUTPUTS):
        scale *= 1 / math.sqrt(residual_writes)
    elif name.endswith("conv_weight"):
        # A channel of the convolution has only `kernel` inputs: keep their variance.
        scale = 1 / math.sqrt(shape[-1])
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    return torch.empty(shape).normal_(0.0, scale, generator=generator)


def _log_decay_rates(heads: int) -> Tensor:
    """Logarithms of rates evenly spread over the range of Mamba-2 (arXiv:2405.21060)."""
    return torch.linspace(*_DECAY_RATES, heads, dtype=torch.float64).log().float()


def _step_bias(heads: int) -> Tensor:
    """The step size of a head is softplus of this: geometrically spread over Mamba's range."""
    low, high = (math.log(size) for size in _STEP_SIZES)
    sizes = torch.linspace(low, high, heads, dtype=torch.float64).exp()
    return torch.log(torch.expm1(sizes)).float()


_VECTORS: Final[dict[str, Callable[[int], Tensor]]] = {
    "log_decay": _log_decay_rates,
    "step_bias": _step_bias,
    "conv_bias": torch.zeros,
    "bias": torch.zeros,
}
