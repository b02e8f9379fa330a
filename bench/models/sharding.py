"""What a model says about how it is sharded: its units, and meshes that it was cut over.

A model names the classes of its units in `unit_classes`; what lies outside of their instances is
the root's. It sets `tensor_mesh`, of dimensions (`dp_outer` if there is an outer axis, `dp`, `tp`),
where parameters are DTensors of tensor parallelism, and `expert_mesh`, of dimensions (`dp_outer`,
`dp`, `ep`), where ranks hold different experts (the parameters with `allreduce = False`) and `dp`
are those that share one.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


def unit_classes(model: nn.Module) -> tuple[type[nn.Module], ...]:
    """The classes that `model` names."""
    classes: tuple[type[nn.Module], ...] = getattr(model, "unit_classes", ())
    return classes


def units(model: nn.Module) -> list[nn.Module]:
    """Instances of those classes in registration order; of nested ones the outermost."""
    classes = unit_classes(model)
    modules: list[nn.Module] = []

    def walk(module: nn.Module) -> None:
        for child in module.children():
            if isinstance(child, classes):
                modules.append(child)
            else:
                walk(child)

    walk(model)
    return list(dict.fromkeys(modules))


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
