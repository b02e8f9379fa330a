"""Meshes that a model brings along, because it was cut over them before any engine saw it.

A model sets `tensor_mesh`, of dimensions (`dp`, `tp`), where parameters are DTensors of tensor
parallelism, and `expert_mesh`, of dimensions (`dp`, `ep`), where ranks hold different experts (the
parameters with `allreduce = False`) and `dp` are those that share one.
"""

from __future__ import annotations

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

DATA, TENSOR, EXPERT = "dp", "tp", "ep"


def tensor_mesh(model: nn.Module) -> DeviceMesh | None:
    """The mesh of data and tensor parallelism, None for a model without the latter."""
    mesh: DeviceMesh | None = getattr(model, "tensor_mesh", None)
    return mesh


def expert_mesh(model: nn.Module) -> DeviceMesh | None:
    """The mesh of the ranks that share an expert, None for a model without such experts."""
    mesh: DeviceMesh | None = getattr(model, "expert_mesh", None)
    return mesh
