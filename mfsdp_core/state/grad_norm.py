"""Norm and clipping of gradients whose shards lie on different ranks."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

from mfsdp_core.comm.uneven import sum_over_ranks
from mfsdp_core.shard.dtensor import local_tensor
from mfsdp_core.shard.experts import ExpertScope, expert_scope
from mfsdp_core.state.optimizer_parameters import Owners, are_whole, optimizer_gradient


@torch.no_grad()
def clip_grad_norm_(
    parameters: nn.Module | Iterable[torch.Tensor], max_norm: float
) -> torch.Tensor:
    """Scale all gradients in place so that their joint 2-norm is at most `max_norm`.

    Like `torch.nn.utils.clip_grad_norm_` on the whole gradient (coefficient
    `max_norm / (norm + 1e-6)`, at most 1), computed from shards: each rank sums the squares of its
    own rows and one all-reduce of a scalar adds them up. Collective. Returns the norm before
    clipping, a scalar tensor equal on all ranks. `max_norm` may be infinite to measure only.

    parameters: the wrapped model or its parameters. Gradients that the cycle still owes are
    finished first, so that nothing un-reduced is measured.
    """
    if isinstance(parameters, nn.Module):
        parameters = parameters.parameters()
    parameters = list(parameters)
    for owner in Owners(parameters):
        owner.finish_grad_sync()
    owned = [(p, g) for p in parameters if (g := optimizer_gradient(p)) is not None]
    gradients = [gradient for _, gradient in owned]
    if not gradients:
        return torch.zeros((), device=parameters[0].device if parameters else None)
    norm = _norm((expert_scope(parameter), gradient) for parameter, gradient in owned)
    if max_norm != float("inf"):
        coefficient = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        torch._foreach_mul_([local_tensor(g) for g in gradients], coefficient)
    return norm


def _norm(gradients: Iterable[tuple[ExpertScope | None, torch.Tensor]]) -> torch.Tensor:
    """2-norm over all ranks' rows; sharded gradients are summed per mesh, replicas count once.

    Experts are summed over the ranks that share one, and then over all others: each of those adds
    an equal part of what its own set of ranks has found.
    """
    alike: dict[tuple[ExpertScope | None, object], list[torch.Tensor]] = {}
    for scope, gradient in gradients:
        key: object = None
        if isinstance(gradient, DTensor) and not are_whole([gradient]):
            key = gradient.device_mesh, gradient.placements
        alike.setdefault((scope, key), []).append(gradient)
    total: torch.Tensor | float = 0.0
    for (scope, _), tensors in alike.items():
        squares = _sum_of_squares([local_tensor(tensor) for tensor in tensors])
        first = tensors[0]
        if isinstance(first, DTensor):
            for dim, placement in enumerate(first.placements):
                if not isinstance(placement, Replicate):
                    squares = sum_over_ranks(squares, first.device_mesh.get_group(dim))
        if scope is not None:
            squares = squares / scope.copies
            for group in scope.groups:
                squares = sum_over_ranks(squares, group)
        total = total + squares
    assert isinstance(total, torch.Tensor)
    return total.sqrt()


def _sum_of_squares(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Scalar, at least float32, so that squares of half-precision values do not overflow."""
    dtype = torch.float64 if tensors[0].dtype is torch.float64 else torch.float32
    norms = torch._foreach_norm(tensors, 2, dtype=dtype)
    return torch.stack(list(norms)).square().sum()
