"""The part of a parameter that tensor parallelism has left to this rank, and how it is recognised.

Sharding knows nothing of tensor parallelism: flat buffers hold *local* tensors, in their local
shapes (a parameter cut along dim 1 has shorter rows than its global shape says, R15). Only two
faces show the whole: the optimizer's shard, a DTensor over (outer, inner, tensor), and the compute
weight, which is again what it was before sharding.

Three kinds of parameters come from a model on a mesh with a tensor-parallel axis:

    DTensor over that axis      as torch's `parallelize_module` makes them; stays one in forward
    tensor_model_parallel and   plain tensors cut by hand along dim `partition_dim`, as
    partition_dim               Megatron-Core's layers mark them (or `_tensor_parallel_mode`)
    anything else               replicated along the axis
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from mfsdp_core.errors import CapabilityNotBuiltError, ConfigurationError
from mfsdp_core.plan.layout import Shape


@dataclass(frozen=True)
class TensorPart:
    """What one rank of the tensor-parallel axis holds of a parameter.

    shape: of the local part, which the flat buffer holds. offsets: where it begins in the whole.
    whole_shape: over all ranks of the axis. placement: None where the mesh has no such axis.
    axis_size: ranks along it.
    """

    shape: Shape
    offsets: tuple[int, ...]
    whole_shape: Shape
    placement: Placement | None = None
    axis_size: int = 1

    @property
    def cuts_rows(self) -> bool:
        """Whether the axis cuts dim 0, before data-parallel axes cut what is left of it."""
        return isinstance(self.placement, Shard) and self.placement.dim == 0


def tensor_part(name: str, raw: torch.Tensor, group: dist.ProcessGroup | None) -> TensorPart:
    """This rank's part of parameter `name`. group: the ranks of tp_dim, None without it.

    Raises:
        ConfigurationError: the parameter is cut along another axis than that of `group`.
        CapabilityNotBuiltError: it is cut in a way that one placement on one axis cannot say.
    """
    if isinstance(raw, DTensor):
        return _part_of_dtensor(name, raw, group)
    shape = tuple(raw.shape)
    if group is None:
        return TensorPart(shape, (0,) * len(shape), shape)
    dim = _partition_dim(name, raw)
    if dim is None:
        return TensorPart(shape, (0,) * len(shape), shape, Replicate(), group.size())
    offsets, whole = [0] * len(shape), list(shape)
    offsets[dim], whole[dim] = group.rank() * shape[dim], group.size() * shape[dim]
    return TensorPart(shape, tuple(offsets), tuple(whole), Shard(dim), group.size())


def local_data(raw: torch.Tensor) -> torch.Tensor:
    """The plain tensor behind a compute weight, detached."""
    data = raw.detach()
    return data.to_local() if isinstance(data, DTensor) else data


def move_to(raw: torch.nn.Parameter, view: torch.Tensor) -> None:
    """Let a compute weight live in `view`, of its local shape; the object stays the same.

    `.data` gives the parameter a version counter of its own: refilling the buffer must not look to
    autograd like an in-place change of a saved tensor. A DTensor is never changed in place itself.
    """
    if isinstance(raw, DTensor):
        raw._local_tensor = view.data
    else:
        raw.data = view.data


def local_gradient(raw: torch.Tensor) -> torch.Tensor | None:
    """The plain tensor behind the gradient that autograd has finished for a compute weight.

    The gradient of a DTensor may have another placement than the DTensor itself, such as a partial
    sum for a norm's weight under sequence parallelism; it is brought into the same one, which is a
    collective of torch's along the tensor-parallel axis.
    """
    gradient = raw.grad
    if not isinstance(gradient, DTensor) or not isinstance(raw, DTensor):
        return gradient
    if gradient.placements != raw.placements:
        gradient = gradient.redistribute(placements=raw.placements)
    local: Any = gradient.to_local()
    if hasattr(local, "wait"):
        local = local.wait()
    result: torch.Tensor = local
    return result


def _part_of_dtensor(name: str, raw: DTensor, group: dist.ProcessGroup | None) -> TensorPart:
    mesh: DeviceMesh = raw.device_mesh
    if group is None:
        raise ConfigurationError(
            f"{name} is a DTensor already, on the mesh {mesh}. If that is tensor parallelism, name "
            "its dimension with tp_dim; otherwise shard plain tensors."
        )
    wanted = dist.get_process_group_ranks(group)
    if mesh.ndim != 1 or dist.get_process_group_ranks(mesh.get_group(0)) != wanted:
        raise ConfigurationError(
            f"{name} is a DTensor on the mesh {mesh}; expected one on the tp_dim axis alone, whose "
            f"ranks here are {wanted}. Parallelise it over device_mesh[tp_dim]."
        )
    (placement,) = raw.placements
    if not (type(placement) is Shard or isinstance(placement, Replicate)):
        raise CapabilityNotBuiltError(
            f"{name} is placed {placement} along tp_dim; only Shard and Replicate are built."
        )
    shape, offsets = compute_local_shape_and_global_offset(raw.shape, mesh, raw.placements)
    return TensorPart(tuple(shape), tuple(offsets), tuple(raw.shape), placement, group.size())


def _partition_dim(name: str, raw: torch.Tensor) -> int | None:
    """The dim that hand-made tensor parallelism has cut, from the marks on the parameter."""
    mode = getattr(raw, "_tensor_parallel_mode", None)
    if mode in ("column", "row"):
        return 0 if mode == "column" else 1
    dim = getattr(raw, "partition_dim", -1)
    if not getattr(raw, "tensor_model_parallel", False) or dim is None or dim < 0:
        return None
    if getattr(raw, "partition_stride", 1) not in (1, None):
        raise CapabilityNotBuiltError(
            f"{name} has partition_stride={raw.partition_stride}: parts that interleave along "  # type: ignore[attr-defined]
            "tp_dim are not built; only a stride of 1 is."
        )
    return int(dim)
