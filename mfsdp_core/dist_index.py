"""Upstream's index of meshes and process groups, as a plain dataclass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from mfsdp_core.errors import ConfigurationError


@dataclass
class FSDPDistributedIndex:
    """The meshes and groups a model is sharded over; fields are arguments of `fully_shard_model`.

    hsdp_outer_dp_shard: the outer dimension shards the optimizer as well. Everything is checked
    where a model is sharded with it.
    """

    device_mesh: DeviceMesh
    dp_shard_dim: str | None = None
    dp_outer_dim: str | None = None
    tp_dim: str | None = None
    hybrid_fsdp_group: dist.ProcessGroup | None = None
    hybrid_fsdp_expt_group: dist.ProcessGroup | None = None
    hsdp_outer_dp_shard: bool = False
    expt_device_mesh: DeviceMesh | None = None
    fsdp_group_ag: dist.ProcessGroup | None = None
    expt_fsdp_group_ag: dist.ProcessGroup | None = None

    @property
    def use_hybrid_fsdp(self) -> bool:
        """Whether there is an outer data-parallel dimension."""
        return self.dp_outer_dim is not None

    def get_root_mesh(self, is_expert_parallel: bool = False) -> DeviceMesh | None:
        """The mesh of dense parameters, or that of experts."""
        return self.expt_device_mesh if is_expert_parallel else self.device_mesh

    def get_submesh(
        self, mesh_dim_names: str | Sequence[str], is_expert_parallel: bool = False
    ) -> DeviceMesh:
        """The named dimensions of one of the meshes.

        Raises:
            ConfigurationError: no such mesh, or it lacks a dimension.
        """
        mesh = self.get_root_mesh(is_expert_parallel)
        names = (mesh_dim_names,) if isinstance(mesh_dim_names, str) else tuple(mesh_dim_names)
        if mesh is not None and mesh.mesh_dim_names == names:
            return mesh
        try:
            if mesh is not None:
                return mesh[names]
        except (KeyError, RuntimeError, ValueError):
            pass
        raise ConfigurationError(
            f"the {'expert' if is_expert_parallel else 'device'} mesh has no dimensions {names}; "
            f"found {None if mesh is None else mesh.mesh_dim_names}."
        )

    def get_fsdp_group(
        self, is_expert_parallel: bool = False, independent_all_gather: bool = False
    ) -> dist.ProcessGroup | None:
        """Ranks of the inner dimension; independent_all_gather: the group for gathers alone."""
        if independent_all_gather:
            return self.expt_fsdp_group_ag if is_expert_parallel else self.fsdp_group_ag
        return self._group(self.dp_shard_dim, is_expert_parallel)

    def get_outer_fsdp_group(self, is_expert_parallel: bool = False) -> dist.ProcessGroup | None:
        """Ranks of the outer dimension; None without one."""
        if self.dp_outer_dim is None:
            return None
        return self._group(self.dp_outer_dim, is_expert_parallel)

    def get_dp_group(self, is_expert_parallel: bool = False) -> dist.ProcessGroup | None:
        """All data-parallel ranks: both dimensions where there are two."""
        if not self.use_hybrid_fsdp:
            return self.get_fsdp_group(is_expert_parallel)
        return self.hybrid_fsdp_expt_group if is_expert_parallel else self.hybrid_fsdp_group

    def get_logical_hybrid_fsdp_rank(self, is_expert_parallel: bool = False) -> int:
        """Index of this rank's part where both dimensions shard: the inner one cuts first.

        Raises:
            ConfigurationError: the outer dimension does not shard.
        """
        inner = self.get_fsdp_group(is_expert_parallel)
        outer = self.get_outer_fsdp_group(is_expert_parallel)
        if not self.hsdp_outer_dp_shard or inner is None or outer is None:
            raise ConfigurationError(
                "get_logical_hybrid_fsdp_rank() is for an outer dimension that shards "
                "(hsdp_outer_dp_shard=True); this one does not."
            )
        return dist.get_rank(inner) * outer.size() + dist.get_rank(outer)

    def _group(self, dim: str | None, is_expert_parallel: bool) -> dist.ProcessGroup | None:
        mesh = self.get_root_mesh(is_expert_parallel)
        if mesh is None:
            return None
        if dim is None and mesh.ndim == 1:
            return mesh.get_group(0)
        return None if dim is None else self.get_submesh(dim, is_expert_parallel).get_group()
