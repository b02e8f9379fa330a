"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864), rotate-half form.

The tables are not module buffers on purpose: a buffer would be rounded by `module.to(bfloat16)`,
which costs position accuracy, and would have to be moved, saved and sharded. They are recomputed
once per (length, device) and always FP32.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from bench.spec import RopeScaling


class RotaryTables(NamedTuple):
    """Cosines and sines, each FP32 of shape [seq_len, head_dim], both halves equal."""

    cos: Tensor
    sin: Tensor


class RotaryCache:
    """The tables of the latest (length, device); one model runs one sequence length at a time."""

    def __init__(self, head_dim: int, theta: float, scaling: RopeScaling | None = None) -> None:
        if head_dim % 2:
            raise ValueError(f"rotary embedding needs an even head_dim, found {head_dim}")
        self._head_dim = head_dim
        self._theta = theta
        self._scaling = scaling
        self._key: tuple[int, torch.device] | None = None
        self._tables: RotaryTables | None = None

    def tables(self, seq_len: int, device: torch.device) -> RotaryTables:
        """Tables for positions 0..seq_len-1 on `device`, computed at the first call only."""
        key = (seq_len, device)
        if self._tables is None or self._key != key:
            self._tables = self._compute(seq_len, device)
            self._key = key
        return self._tables

    def _compute(self, seq_len: int, device: torch.device) -> RotaryTables:
        # Angles in FP64 on the CPU: every device and every rank gets the same rounded table.
        exponents = torch.arange(0, self._head_dim, 2, dtype=torch.float64) / self._head_dim
        frequencies = stretched(self._theta**-exponents, self._scaling)
        angles = torch.outer(torch.arange(seq_len, dtype=torch.float64), frequencies)
        both = torch.cat((angles, angles), dim=-1)
        return RotaryTables(both.cos().float().to(device), both.sin().float().to(device))


def stretched(frequencies: Tensor, scaling: RopeScaling | None) -> Tensor:
    """Rotary frequencies (radians per position) for longer contexts; see `RopeScaling`.

    The rule of Llama 3.1: Grattafiori et al. 2024 (arXiv:2407.21783) raise theta for long contexts;
    the three ranges of wavelengths are those of the released models' `rope_scaling`.
    """
    if scaling is None:
        return frequencies
    divided = frequencies / scaling.factor
    if scaling.kind == "linear":
        return divided
    turns_in_original = scaling.original_positions * frequencies / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = ((turns_in_original - low) / (high - low)).clamp(0, 1)
    return divided + kept * (frequencies - divided)


def apply_rotary(x: Tensor, tables: RotaryTables) -> Tensor:
    """Rotate `x` [batch, heads, seq_len, head_dim] in FP32 or wider; same dtype as x out."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    first, second = wide.chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    return (wide * tables.cos + turned * tables.sin).to(x.dtype)
