"""Norm and clipping of gradients whose shards lie on different ranks."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from mfsdp_core.comm.uneven import sum_over_ranks


@torch.no_grad()
def clip_grad_norm_(
    parameters: nn.Module | Iterable[torch.Tensor], max_norm: float
) -> torch.Tensor:
    """Scale all gradients in place so that their joint 2-norm is at most `max_norm`.

    Like `torch.nn.utils.clip_grad_norm_` on the whole gradient (coefficient
    `max_norm / (norm + 1e-6)`, at most 1), computed from shards: each rank sums the squares of its
    own rows and one all-reduce of a scalar adds them up. Collective. Returns the norm before
    clipping, a scalar tensor equal on all ranks. `max_norm` may be infinite to measure only.

    parameters: the wrapped model or its parameters, after gradients have been finished.
    """
    if isinstance(parameters, nn.Module):
        parameters = parameters.parameters()
    gradients = [p.grad for p in parameters if p.grad is not None]
    norm = _norm(gradients)
    if max_norm != float("inf") and gradients:
        coefficient = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        torch._foreach_mul_([_local(g) for g in gradients], coefficient)
    return norm


def _norm(gradients: list[torch.Tensor]) -> torch.Tensor:
    """2-norm over all ranks' rows; sharded gradients are summed per mesh, replicas count once."""
    sharded: dict[object, list[DTensor]] = {}
    whole: list[torch.Tensor] = []
    for gradient in gradients:
        if isinstance(gradient, DTensor) and isinstance(gradient.placements[0], Shard):
            sharded.setdefault(gradient.device_mesh, []).append(gradient)
        else:
            whole.append(_local(gradient))
    total = _sum_of_squares(whole) if whole else None
    for shards in sharded.values():
        squares = _sum_of_squares([_local(shard) for shard in shards])
        squares = sum_over_ranks(squares, shards[0].device_mesh.get_group())
        total = squares if total is None else total + squares
    return torch.zeros(()) if total is None else total.sqrt()


def _sum_of_squares(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Scalar, at least float32, so that squares of half-precision values do not overflow."""
    dtype = torch.float64 if tensors[0].dtype is torch.float64 else torch.float32
    norms = torch._foreach_norm(tensors, 2, dtype=dtype)
    return torch.stack(list(norms)).square().sum()


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
