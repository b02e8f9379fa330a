"""From the mesh arguments of the public functions to the axes that parameters are sharded over."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from mfsdp_core.comm.data_parallel import DataParallelAxes
from mfsdp_core.errors import ConfigurationError
from mfsdp_core.streams import current_device, default_kind


@dataclass(frozen=True)
class AxisNames:
    """Names of mesh dimensions: dp_shard_dim, dp_outer_dim and tp_dim of the public functions."""

    inner: str | None = None
    outer: str | None = None
    tensor: str | None = None


@dataclass(frozen=True)
class _ArgumentNames:
    """What the caller knows the three arguments by."""

    mesh: str
    hybrid_group: str
    gather_group: str


_DENSE = _ArgumentNames("device_mesh", "hybrid_fsdp_group", "fsdp_group_ag")
_EXPERT = _ArgumentNames("expt_device_mesh", "hybrid_fsdp_expt_group", "expt_fsdp_group_ag")


def dense_axes(
    mesh: DeviceMesh | None,
    names: AxisNames,
    hybrid_group: dist.ProcessGroup | None,
    gather_group: dist.ProcessGroup | None,
) -> DataParallelAxes:
    """The axes of everything that is no expert; `mesh` None is a mesh over all ranks.

    `mesh` may have further dimensions, and names may be those of flattened ones.

    Raises:
        ConfigurationError: no ranks, unknown or missing dimensions, a hybrid group that does not
            hold exactly the ranks of both axes, or a gather group over other ranks than the inner.
    """
    if (names.outer is None) != (hybrid_group is None):
        raise ConfigurationError(
            "hybrid sharding needs both dp_outer_dim and hybrid_fsdp_group; found only "
            f"{'hybrid_fsdp_group' if names.outer is None else 'dp_outer_dim'}. Flatten both "
            "dimensions of the mesh for the group: mesh[outer, inner]._flatten().get_group()."
        )
    if mesh is None:
        if names != AxisNames():
            raise ConfigurationError(
                "dp_shard_dim, dp_outer_dim and tp_dim name dimensions of device_mesh, and there "
                "is none."
            )
        mesh = _world_mesh()
    return _axes(mesh, names, hybrid_group, gather_group, _DENSE)


def expert_axes(
    mesh: DeviceMesh | None,
    names: AxisNames,
    hybrid_group: dist.ProcessGroup | None,
    gather_group: dist.ProcessGroup | None,
    dense: DataParallelAxes,
) -> DataParallelAxes | None:
    """The axes of expert parameters, under the names that `dense` goes by; None without a mesh.

    The ranks that share an expert are a part of those that share the dense parameters. tp_dim may
    be absent from `mesh`: then experts are whole on every rank that has them.

    Raises:
        ConfigurationError: as for `dense_axes`; a group without a mesh; ranks outside of `dense`.
    """
    if mesh is None:
        for argument, group in (
            (_EXPERT.hybrid_group, hybrid_group),
            (_EXPERT.gather_group, gather_group),
        ):
            if group is not None:
                raise ConfigurationError(f"{argument} needs expt_device_mesh, and there is none.")
        return None
    if (names.outer is None) != (hybrid_group is None):
        raise ConfigurationError(
            "hybrid sharding of experts needs dp_outer_dim and hybrid_fsdp_expt_group, a group "
            "over both data-parallel dimensions of expt_device_mesh; found only "
            f"{'hybrid_fsdp_expt_group' if names.outer is None else 'dp_outer_dim'}."
        )
    if names.tensor not in (mesh.mesh_dim_names or ()):
        names = AxisNames(names.inner, names.outer)
    experts = _axes(mesh, names, hybrid_group, gather_group, _EXPERT)
    outside = set(experts.ranks) - set(dense.ranks)
    if outside or len(dense.ranks) % len(experts.ranks):
        raise ConfigurationError(
            f"the ranks that share an expert, {experts.ranks}, must be a part of those of "
            f"device_mesh, {dense.ranks}, and divide them evenly."
        )
    return experts


def target_device(device: torch.device | str | int | None, mesh: DeviceMesh) -> torch.device:
    """The device that this rank's part of the model lives on."""
    if isinstance(device, int):
        return torch.device(mesh.device_type, device)
    kind = torch.device(mesh.device_type)
    given = kind if device is None else torch.device(device)
    return current_device(kind.type) if given == kind else given


def _axes(
    mesh: DeviceMesh,
    names: AxisNames,
    hybrid_group: dist.ProcessGroup | None,
    gather_group: dist.ProcessGroup | None,
    arguments: _ArgumentNames,
) -> DataParallelAxes:
    if names.inner is None:
        if names != AxisNames():
            raise ConfigurationError("dp_outer_dim and tp_dim need dp_shard_dim, the inner one.")
        if mesh.ndim != 1:
            raise ConfigurationError(
                f"{arguments.mesh} has {mesh.ndim} dimensions {mesh.mesh_dim_names}; say which "
                "one shards the data-parallel ranks with dp_shard_dim."
            )
        data_parallel = whole = mesh
    else:
        kept = (names.inner,) if names.outer is None else (names.outer, names.inner)
        data_parallel = whole = _slice(mesh, kept, arguments)
        if names.tensor is not None:
            whole = _slice(mesh, (*kept, names.tensor), arguments)
    _check_ranks(hybrid_group, data_parallel.mesh.flatten().tolist(), arguments.hybrid_group)
    inner = dist.get_process_group_ranks(data_parallel.get_group(data_parallel.ndim - 1))
    _check_ranks(gather_group, inner, arguments.gather_group, ordered=True)
    prefix = "expert_" if arguments is _EXPERT else ""
    return DataParallelAxes(data_parallel, whole, gather_group, prefix, hybrid_group)


def _world_mesh() -> DeviceMesh:
    if not dist.is_initialized():
        raise ConfigurationError(
            "fully_shard_model needs ranks: call torch.distributed.init_process_group first, "
            "or pass device_mesh."
        )
    return init_device_mesh(default_kind(), (dist.get_world_size(),))


def _slice(mesh: DeviceMesh, names: tuple[str, ...], arguments: _ArgumentNames) -> DeviceMesh:
    if mesh.mesh_dim_names == names:
        return mesh
    try:
        with warnings.catch_warnings():
            # Flattened dimensions are how upstream's users spell data times context parallelism;
            # torch announces that they will be looked up elsewhere one day.
            warnings.filterwarnings("ignore", message="Slicing a flattened dim")
            return mesh[names]
    except (KeyError, RuntimeError, ValueError) as error:
        raise ConfigurationError(
            f"cannot take the dimensions {names} of {arguments.mesh}, which has "
            f"{mesh.mesh_dim_names} ({error}). The outer dimension comes before the inner one, "
            "and the tensor-parallel one after both; a flattened dimension belongs to the mesh "
            "that it was flattened in."
        ) from error


def _check_ranks(
    group: dist.ProcessGroup | None, wanted: list[int], argument: str, *, ordered: bool = False
) -> None:
    if group is None:
        return
    found = dist.get_process_group_ranks(group)
    if (found if ordered else sorted(found)) == (wanted if ordered else sorted(wanted)):
        return
    axes, order = ("the inner axis", " in order") if ordered else ("both axes", "")
    raise ConfigurationError(
        f"{argument} must hold the ranks of {axes}{order}, {wanted}; found {found}."
    )
