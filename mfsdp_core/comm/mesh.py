"""From the mesh arguments of the public functions to the axes that parameters are sharded over."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from mfsdp_core.comm.data_parallel import DataParallelAxes
from mfsdp_core.errors import ConfigurationError, refuse_configuration
from mfsdp_core.plan.options import Options
from mfsdp_core.streams import current_device, default_kind


class _MeshArguments(NamedTuple):
    """What the caller gave for one kind of parameters, and the prefix of its groups in events."""

    mesh: str
    hybrid_group: str
    gather_group: str
    role_prefix: str


_DENSE = _MeshArguments("device_mesh", "hybrid_fsdp_group", "fsdp_group_ag", "")
_EXPERT = _MeshArguments(
    "expt_device_mesh", "hybrid_fsdp_expt_group", "expt_fsdp_group_ag", "expert_"
)


def dense_axes(options: Options) -> DataParallelAxes:
    """The axes of everything that is no expert; without a mesh, those of one over all ranks.

    A mesh may have further dimensions, and names may be those of flattened ones.

    Raises:
        ConfigurationError: no ranks, unknown or missing dimensions, a hybrid group that does not
            hold exactly the ranks of both axes, or a gather group over other ranks than the inner.
    """
    mesh = options.device_mesh
    if mesh is None:
        names = (options.dp_shard_dim, options.dp_outer_dim, options.tp_dim)
        refuse_configuration(
            [
                (
                    names != (None, None, None),
                    "dp_shard_dim, dp_outer_dim and tp_dim name dimensions of device_mesh, and "
                    "there is none.",
                ),
                (
                    not dist.is_initialized(),
                    "fully_shard_model needs ranks: call torch.distributed.init_process_group "
                    "first, or pass device_mesh.",
                ),
            ]
        )
        mesh = init_device_mesh(default_kind(), (dist.get_world_size(),))
    return _axes(mesh, options, options.tp_dim, _DENSE)


def expert_axes(options: Options, dense: DataParallelAxes) -> DataParallelAxes | None:
    """The axes of expert parameters, under the names that `dense` goes by; None without a mesh.

    The ranks that share an expert are a part of those that share the dense parameters. tp_dim may
    be absent from the mesh: then experts are whole on every rank that has them.

    Raises:
        ConfigurationError: as for `dense_axes`; a group without a mesh; ranks outside of `dense`.
    """
    mesh = options.expt_device_mesh
    if mesh is None:
        refuse_configuration(
            (
                getattr(options, name) is not None,
                f"{name} needs {_EXPERT.mesh}, and there is none.",
            )
            for name in (_EXPERT.hybrid_group, _EXPERT.gather_group)
        )
        return None
    has_tensor_axis = options.tp_dim in (mesh.mesh_dim_names or ())
    experts = _axes(mesh, options, options.tp_dim if has_tensor_axis else None, _EXPERT)
    outside = set(experts.ranks) - set(dense.ranks)
    wrong = (
        f"the ranks that share an expert, {experts.ranks}, must be a part of those of "
        f"device_mesh, {dense.ranks}, and divide them evenly."
    )
    refuse_configuration([(outside or len(dense.ranks) % len(experts.ranks), wrong)])
    return experts


def target_device(device: torch.device | str | int | None, mesh: DeviceMesh) -> torch.device:
    """The device that this rank's part of the model lives on."""
    if isinstance(device, int):
        return torch.device(mesh.device_type, device)
    kind = torch.device(mesh.device_type)
    given = kind if device is None else torch.device(device)
    return current_device(kind.type) if given == kind else given


def _axes(
    mesh: DeviceMesh, options: Options, tensor: str | None, arguments: _MeshArguments
) -> DataParallelAxes:
    hybrid: dist.ProcessGroup | None = getattr(options, arguments.hybrid_group)
    gather: dist.ProcessGroup | None = getattr(options, arguments.gather_group)
    outer, inner = options.dp_outer_dim, options.dp_shard_dim
    refuse_configuration(_wrong_names(mesh, (outer, inner, tensor), hybrid, arguments))
    data_parallel = whole = mesh
    if inner is not None:
        kept = (inner,) if outer is None else (outer, inner)
        data_parallel = whole = _slice(mesh, kept, arguments)
        if tensor is not None:
            whole = _slice(mesh, (*kept, tensor), arguments)
    _check_ranks(hybrid, data_parallel.mesh.flatten().tolist(), arguments.hybrid_group)
    ranks = dist.get_process_group_ranks(data_parallel.get_group(data_parallel.ndim - 1))
    _check_ranks(gather, ranks, arguments.gather_group, ordered=True)
    return DataParallelAxes(data_parallel, whole, gather, arguments.role_prefix, hybrid)


def _wrong_names(
    mesh: DeviceMesh,
    names: tuple[str | None, str | None, str | None],
    hybrid: dist.ProcessGroup | None,
    arguments: _MeshArguments,
) -> Iterator[tuple[object, str]]:
    outer, inner, tensor = names
    yield (
        (outer is None) != (hybrid is None),
        f"hybrid sharding needs both dp_outer_dim and {arguments.hybrid_group}; found only "
        f"{arguments.hybrid_group if outer is None else 'dp_outer_dim'}. Flatten both dimensions "
        f"of {arguments.mesh} for the group: mesh[outer, inner]._flatten().get_group().",
    )
    yield (
        inner is None and (outer or tensor),
        "dp_outer_dim and tp_dim need dp_shard_dim, the inner one.",
    )
    yield (
        inner is None and mesh.ndim != 1,
        f"{arguments.mesh} has {mesh.ndim} dimensions {mesh.mesh_dim_names}; say which one shards "
        "the data-parallel ranks with dp_shard_dim.",
    )


def _slice(mesh: DeviceMesh, names: tuple[str, ...], arguments: _MeshArguments) -> DeviceMesh:
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
