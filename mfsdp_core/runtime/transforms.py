"""Tensors of `torch.func`: wrappers around wrappers, each with a graph of its own."""

from __future__ import annotations

import torch
from torch.autograd import forward_ad


def levels(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensor, then what it wraps, level by level; a plain one alone."""
    found = [tensor]
    while torch._C._functorch.is_functorch_wrapped_tensor(found[-1]):
        found.append(torch._C._functorch.get_unwrapped(found[-1]))
    return found


def _tangents(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Directional derivatives beside them, which forward mode computes in graphs of their own."""
    if forward_ad._current_level < 0:
        return []
    found = [forward_ad.unpack_dual(tensor).tangent for tensor in tensors]
    return [tangent for tangent in found if tangent is not None]


def with_graphs(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Of all levels of `tensors`, those through which a backward pass may come."""
    return [
        level
        for tensor in [*tensors, *_tangents(tensors)]
        for level in levels(tensor)
        if level.requires_grad and not level.is_leaf
    ]
