"""Shards as DTensors, and what torch gets wrong about uneven ones.

[Note: uneven shards] A shard holds whole rows of dim 0, but how many is decided by the flat layout,
not by torch's even chunks. torch's `DTensor.full_tensor()` assumes the latter and returns rows in
wrong places without an error (R13): use `gather_full`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import _StridedShard

from mfsdp_core.comm.rendezvous import agree_on_read
from mfsdp_core.comm.uneven import gather_rows
from mfsdp_core.errors import LayoutError
from mfsdp_core.plan.coordinate import Coordinate
from mfsdp_core.plan.layout import Shape
from mfsdp_core.plan.strategy import Strategy
from mfsdp_core.shard.tensor_parallel import TensorPart

#: Attribute of a shard: what errors call it.
_NAME = "_mfsdp_name"


def contiguous_stride(shape: Shape) -> tuple[int, ...]:
    """Strides, in elements, of a contiguous tensor of `shape`."""
    strides = [1] * len(shape)
    for dim in reversed(range(len(shape) - 1)):
        strides[dim] = strides[dim + 1] * shape[dim + 1]
    return tuple(strides)


def dtensor_placements(
    strategy: Strategy, coordinate: Coordinate, part: TensorPart
) -> tuple[Placement, ...]:
    """Placements of main weights on a mesh (outer, inner, tensor), of which only inner must exist.

    Dim 0 is cut from the right: by the tensor-parallel axis, where it cuts rows at all, then by the
    inner one, and each of those parts by the outer one (sub-shards are inner-major). torch spells
    that as strided shards, whose `split_factor` is the number of cuts made before.
    """
    inner: Placement = Replicate()
    if strategy.inner.shards_optimizer:
        inner = _StridedShard(0, split_factor=part.axis_size) if part.cuts_rows else Shard(0)
    placements = [inner]
    if coordinate.has_outer_axis:
        cuts = coordinate.inner_size * (part.axis_size if part.cuts_rows else 1)
        outer = _StridedShard(0, split_factor=cuts) if strategy.outer.shards_optimizer else None
        placements.insert(0, outer or Replicate())
    if part.placement is not None:
        placements.append(part.placement)
    return tuple(placements)


def as_dtensor(
    local: torch.Tensor, shape: Shape, mesh: DeviceMesh, placements: tuple[Placement, ...]
) -> DTensor:
    """`local`, whole rows (or all) of a tensor of `shape`, as a DTensor; no communication.

    A sharded scalar (`shape` == ()) is held as one row by the rank that owns it.
    """
    if not shape and any(placement.is_shard() for placement in placements):
        shape = (1,)
    meta = TensorMeta(torch.Size(shape), contiguous_stride(shape), local.dtype)
    return as_specified(local, DTensorSpec(mesh, placements, tensor_meta=meta))


def as_specified(local: torch.Tensor, spec: DTensorSpec) -> DTensor:
    """`local` as the DTensor that `spec` describes; autograd follows where it requires a gradient.

    `DTensor.from_local` takes five times as long, which thousands of parameters feel.
    """
    if local.requires_grad:
        meta: Any = spec.tensor_meta
        return DTensor.from_local(
            local,
            spec.mesh,
            spec.placements,
            run_check=False,
            shape=meta.shape,
            stride=meta.stride,
        )
    return DTensor(local.view_as(local), spec, requires_grad=False)


def without_offset(shard: DTensor) -> DTensor:
    """The same shard, over the same memory, in a form that torch can serialise and copy.

    torch gives a DTensor the storage offset of its local tensor, and then fails to pickle it where
    that is not zero, which is so for most shards of a flat buffer.
    """
    local = shard.to_local()
    # torch takes the shape of a scalar from the local tensor, whatever it is told.
    blank = local.new_empty(0 if shard.ndim else ())
    fresh = as_dtensor(blank, tuple(shard.shape), shard.device_mesh, tuple(shard.placements))
    fresh._local_tensor = local
    return fresh


def local_tensor(value: Any) -> Any:
    """This rank's part of a DTensor itself, not a view of it that autograd follows.

    Anything else is returned unchanged.
    """
    return value._local_tensor if isinstance(value, DTensor) else value


def gather_full(tensor: torch.Tensor) -> torch.Tensor:
    """The whole tensor behind a shard of this package; a plain tensor is returned unchanged.

    Collective over the shard's mesh. Right on uneven and on hybrid shards, where
    `DTensor.full_tensor()` is not (see [Note: uneven shards]). Works for parameters, their
    gradients and optimizer state.

    Raises:
        MismatchedReadError: on all ranks, if they are about to gather different tensors.
    """
    if isinstance(tensor, DTensor):
        agree_to_read([tensor])
    return assemble(tensor)


def assemble(tensor: torch.Tensor) -> torch.Tensor:
    """`gather_full` of a tensor whose read ranks have agreed on."""
    if not isinstance(tensor, DTensor):
        return tensor
    rows = tensor.to_local().detach()
    mesh = tensor.device_mesh
    order = assembly_order(tensor.placements)
    for mesh_dim, dim in order:
        rows = gather_rows(rows.movedim(dim, 0), mesh.get_group(mesh_dim)).movedim(0, dim)
    return rows.reshape(tensor.shape) if order else rows.clone()


def name_tensor(tensor: torch.Tensor, name: str) -> None:
    """What errors call `tensor`, and what ranks compare before they read it."""
    setattr(tensor, _NAME, name)


def name_of(tensor: object) -> str:
    """What `name_tensor` has said; "" for a tensor that nobody has named."""
    found: str = getattr(tensor, _NAME, "")
    return found


def agree_to_read(tensors: Sequence[DTensor], operation: str = "") -> None:
    """Return once all ranks that hold rows of `tensors` are about to read them.

    See [Note: named reads]. operation: of torch, whose collectives differ from those of others.

    Raises:
        MismatchedReadError: on all ranks, if they are about to read different tensors.
    """
    spread = [tensor for tensor in tensors if not all(p.is_replicate() for p in tensor.placements)]
    if not spread:
        return
    mesh = spread[0].device_mesh
    axes = {
        axis
        for tensor in spread
        for axis, p in enumerate(tensor.placements)
        if not p.is_replicate()
    }
    own = mesh.get_coordinate()
    assert own is not None, "a rank that holds a shard is in its mesh"
    index = tuple(slice(None) if axis in axes else own[axis] for axis in range(mesh.ndim))
    ranks = mesh.mesh[index].flatten().tolist()
    what = ", ".join(
        f"{name_of(tensor) or 'a tensor without a name'} {tuple(tensor.shape)} {tensor.dtype}"
        + "".join(f" {p!r}" for p in tensor.placements if p.is_partial())
        for tensor in spread
    )
    what = f"{operation} of {what}" if operation else what
    agree_on_read(ranks, what, mesh.get_group(min(axes)), torch.device(mesh.device_type))


def assembly_order(placements: Sequence[Placement]) -> list[tuple[int, int]]:
    """(mesh dimension, tensor dimension) of every cut, in the order in which they are undone.

    Strided shards have cut after everything to their right, so they come first, from the left: an
    inner slice is made up of the sub-shards of the outer dimension, and what tensor parallelism
    left to a rank of inner slices. Others have cut a dimension from the left to the right.

    Raises:
        LayoutError: a rank holds more than one box, or a part of a sum.
    """
    strided: list[tuple[int, int]] = []
    plain: list[tuple[int, int]] = []
    for mesh_dim, placement in enumerate(placements):
        if isinstance(placement, _StridedShard):
            if any(dim == placement.dim for _, dim in plain):
                raise LayoutError(
                    f"placements {tuple(placements)} give a rank rows that do not lie together."
                )
            strided.append((mesh_dim, placement.dim))
        elif isinstance(placement, Shard):
            plain.append((mesh_dim, placement.dim))
        elif not placement.is_replicate():
            raise LayoutError(f"expected shards and replicas, found {tuple(placements)}.")
    dims = [dim for _, dim in plain]
    # Within a dimension from the right; tensor parallelism, which cuts another one, stays the last.
    return strided + sorted(plain, key=lambda cut: (dims.index(cut[1]), -cut[0]))
