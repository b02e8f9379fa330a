"""Gradients of plain torch in one process, which everything sharded is compared with.

For N data-parallel ranks and k microbatches, g[r][j] is the gradient of rank r on microbatch j. The
gradient handed to the optimizer is (1/N) * sum of all g[r][j], whatever the strategy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

Named = dict[str, Tensor]


def gradient(model: nn.Module, loss: Callable[[], Tensor]) -> tuple[Named, Tensor]:
    """Dense gradients on the CPU by name, and the loss; a frozen parameter is absent.

    A tied parameter comes under its first name, one that got no gradient as zeros.
    """
    model.zero_grad(set_to_none=True)
    value = loss()
    value.backward()
    gradients = {
        name: (torch.zeros_like(p) if p.grad is None else p.grad.to_dense()).detach().cpu().clone()
        for name, p in model.named_parameters()
        if p.requires_grad
    }
    return gradients, value.detach()


def mean(contributions: Sequence[Sequence[Tensor]]) -> Tensor:
    """(1/N) * sum of g[r][j], added up in FP64."""
    every = [tensor.double() for row in contributions for tensor in row]
    return torch.stack(every).sum(0) / len(contributions)


def relative(value: Tensor, expected: Tensor, size: float) -> float:
    """||found - expected|| / size; infinite for what is not finite, or not zero where size is."""
    difference = float((value.double() - expected.double()).norm())
    if difference == 0:
        return 0.0
    if difference != difference or size == 0:  # noqa: PLR0124 - NaN is what differs from itself
        return float("inf")
    return difference / size
