"""Root-mean-square norms, over all channels or over groups of them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dim (Zhang and Sennrich 2019, arXiv:1910.07467)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] to the same shape; the mean is accumulated in FP32 or wider."""
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class GroupedRMSNorm(nn.Module):
    """RMSNorm within each of `groups` equal groups of channels, with one weight per channel."""

    def __init__(self, size: int, groups: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.groups = groups
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] to the same shape."""
        grouped = x.unflatten(-1, (self.groups, -1))
        normed = F.rms_norm(grouped, grouped.shape[-1:], None, self.eps)
        out: Tensor = normed.flatten(-2) * self.weight
        return out
