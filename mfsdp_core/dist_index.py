"""Upstream's index of meshes and process groups, as a plain dataclass."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh


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
