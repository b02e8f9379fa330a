"""Shards as DTensors, and what torch gets wrong about uneven ones.

[Note: uneven shards] A shard holds whole rows of dim 0, but how many is decided by the flat layout,
not by torch's even chunks. torch's `DTensor.full_tensor()` assumes the latter and returns rows in
wrong places without an error (R13): use `gather_full`.
"""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from mfsdp_core.comm.uneven import gather_rows
from mfsdp_core.plan.layout import Shape


def contiguous_stride(shape: Shape) -> tuple[int, ...]:
    """Strides, in elements, of a contiguous tensor of `shape`."""
    strides = [1] * len(shape)
    for dim in reversed(range(len(shape) - 1)):
        strides[dim] = strides[dim + 1] * shape[dim + 1]
    return tuple(strides)


def shard_as_dtensor(local: torch.Tensor, shape: Shape, mesh: DeviceMesh) -> DTensor:
    """`local`, whole rows of a tensor of `shape`, as a DTensor; no communication.

    A scalar (`shape` == ()) is held as one row by the rank that owns it.
    """
    return _from_local(local, shape or (1,), mesh, Shard(0))


def replica_as_dtensor(local: torch.Tensor, mesh: DeviceMesh) -> DTensor:
    """`local` (the whole tensor, equal on all ranks) as a replicated DTensor."""
    return _from_local(local, tuple(local.shape), mesh, Replicate())


def gather_full(tensor: torch.Tensor) -> torch.Tensor:
    """The whole tensor behind a shard of this package; a plain tensor is returned as it is.

    Collective over the shard's mesh. Right on uneven shards, where `DTensor.full_tensor()` is not
    (see [Note: uneven shards]). Works for parameters, their gradients and optimizer state.
    """
    if not isinstance(tensor, DTensor):
        return tensor
    local = tensor.to_local().detach()
    if all(isinstance(placement, Replicate) for placement in tensor.placements):
        return local.clone()
    return gather_rows(local, tensor.device_mesh.get_group()).view(tensor.shape)


def _from_local(
    local: torch.Tensor, shape: Shape, mesh: DeviceMesh, placement: Replicate | Shard
) -> DTensor:
    return DTensor.from_local(
        local,
        mesh,
        [placement],
        run_check=False,
        shape=torch.Size(shape),
        stride=contiguous_stride(shape),
    )
