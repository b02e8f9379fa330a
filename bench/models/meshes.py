"""Meshes that a model brings along, because it was cut over them before any engine saw it.

A model sets `tensor_mesh`, of dimensions (`dp_outer` if there is an outer axis, `dp`, `tp`), where
parameters are DTensors of tensor parallelism, and `expert_mesh`, of dimensions (`dp_outer`, `dp`,
`ep`), where ranks hold different experts (the parameters with `allreduce = False`) and `dp` are
those that share one.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

OUTER, DATA, TENSOR, EXPERT = "dp_outer", "dp", "tp", "ep"


def tensor_mesh(model: nn.Module) -> DeviceMesh | None:
    """The mesh of data and tensor parallelism, None for a model without the latter."""
    mesh: DeviceMesh | None = getattr(model, "tensor_mesh", None)
    return mesh


def expert_mesh(model: nn.Module) -> DeviceMesh | None:
    """The mesh of the ranks that share an expert, None for a model without such experts."""
    mesh: DeviceMesh | None = getattr(model, "expert_mesh", None)
    return mesh


def mesh_of(
    device: torch.device, ranks: int, *, outer: int, last: str | None = None, last_size: int = 1
) -> DeviceMesh:
    """All ranks by outer axis (if above 1), data axis and, named `last`, neighbouring ranks.

    Collective: every rank makes the same groups.
    """
    sizes, names = [ranks // (outer * last_size)], [DATA]
    if outer > 1:
        sizes, names = [outer, *sizes], [OUTER, *names]
    if last is not None:
        sizes, names = [*sizes, last_size], [*names, last]
    return init_device_mesh(device.type, tuple(sizes), mesh_dim_names=tuple(names))
