"""From the mesh arguments of the public functions to the mesh that is sharded over."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from mfsdp_core.errors import ConfigurationError


def data_parallel_mesh(
    mesh: DeviceMesh | None,
    inner: str | None,
    outer: str | None,
    hybrid_group: dist.ProcessGroup | None,
) -> DeviceMesh:
    """The mesh (inner,), or (outer, inner) where `outer` names a dimension.

    Raises:
        ConfigurationError: no ranks, unknown or missing dimensions, or a hybrid group that does not
            hold exactly the ranks of both axes.
    """
    if (outer is None) != (hybrid_group is None):
        raise ConfigurationError(
            "hybrid sharding needs both dp_outer_dim and hybrid_fsdp_group; found only "
            f"{'hybrid_fsdp_group' if outer is None else 'dp_outer_dim'}. Flatten both dimensions "
            "of the mesh for the group: mesh[outer, inner]._flatten().get_group()."
        )
    if mesh is None:
        if inner is not None or outer is not None:
            raise ConfigurationError("dp_shard_dim and dp_outer_dim name dimensions of device_mesh")
        return _world_mesh()
    if outer is not None:
        if inner is None:
            raise ConfigurationError("dp_outer_dim needs dp_shard_dim, the inner dimension.")
        both = _slice(mesh, (outer, inner))
        _check_hybrid_group(hybrid_group, both)
        return both
    if inner is not None:
        mesh = _slice(mesh, (inner,))
    if mesh.ndim != 1:
        raise ConfigurationError(
            f"device_mesh has {mesh.ndim} dimensions {mesh.mesh_dim_names}; say which one shards "
            "the data-parallel ranks with dp_shard_dim."
        )
    return mesh


def check_gather_group(group: dist.ProcessGroup | None, mesh: DeviceMesh) -> None:
    """Refuse a group for gathers over other ranks than the inner axis.

    Raises:
        ConfigurationError: other ranks, or another order.
    """
    if group is None:
        return
    wanted = dist.get_process_group_ranks(mesh.get_group(mesh.ndim - 1))
    found = dist.get_process_group_ranks(group)
    if found != wanted:
        raise ConfigurationError(
            f"fsdp_group_ag must hold the ranks of the sharding mesh in order, {wanted}; "
            f"found {found}."
        )


def target_device(device: torch.device | str | int | None, mesh: DeviceMesh) -> torch.device:
    """The device that this rank's part of the model lives on."""
    if isinstance(device, int):
        return torch.device(mesh.device_type, device)
    if device is not None:
        return torch.device(device)
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    index = torch.get_device_module(mesh.device_type).current_device()
    return torch.device(mesh.device_type, index)


def _world_mesh() -> DeviceMesh:
    if not dist.is_initialized():
        raise ConfigurationError(
            "fully_shard_model needs ranks: call torch.distributed.init_process_group first, "
            "or pass device_mesh."
        )
    device_type = "cuda" if torch.cuda.is_available() else "cpu"
    return init_device_mesh(device_type, (dist.get_world_size(),))


def _slice(mesh: DeviceMesh, names: tuple[str, ...]) -> DeviceMesh:
    try:
        return mesh[names]
    except (KeyError, RuntimeError, ValueError) as error:
        raise ConfigurationError(
            f"cannot take the dimensions {names} of a mesh that has {mesh.mesh_dim_names} "
            f"({error}). The outer dimension must come before the inner one."
        ) from error


def _check_hybrid_group(group: dist.ProcessGroup | None, mesh: DeviceMesh) -> None:
    wanted = sorted(mesh.mesh.flatten().tolist())
    found = sorted(dist.get_process_group_ranks(group))
    if found != wanted:
        raise ConfigurationError(
            f"hybrid_fsdp_group must hold the ranks of both axes, {wanted}; found {found}."
        )
