"""The arguments of `fully_shard_model` as one frozen object, and where their defaults stand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, fields
from typing import Any, Literal, Self

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from mfsdp_core.plan.allocation import SMALLEST_POOL_SLOTS, AllocatorName
from mfsdp_core.plan.config import DEFAULT_TRANSPORT, Transport, UnusedParameters
from mfsdp_core.plan.prefetch import OrderName
from mfsdp_core.precision.policy import MixedPrecisionPolicy

NestedUnits = Literal["outermost", "all"]
UnitModules = Sequence[type[nn.Module] | str]


@dataclass(frozen=True)
class ShardingArguments:
    """As given and not yet checked; `fully_shard_model` says what they mean.

    Names and defaults are upstream's, those of keyword-only fields this package's own.
    """

    device_mesh: DeviceMesh | None = None
    dp_shard_dim: str | None = None
    dp_outer_dim: str | None = None
    tp_dim: str | None = None
    hybrid_fsdp_group: dist.ProcessGroup | None = None
    hybrid_fsdp_expt_group: dist.ProcessGroup | None = None
    expt_device_mesh: DeviceMesh | None = None
    fsdp_group_ag: dist.ProcessGroup | None = None
    expt_fsdp_group_ag: dist.ProcessGroup | None = None
    fsdp_unit_modules: UnitModules | None = None
    zero_dp_strategy: int | str = 3
    outer_dp_sharding_strategy: int | str = 0
    device: torch.device | str | int | None = None
    init_model_with_meta_device: bool = False
    mixed_precision_policy: MixedPrecisionPolicy = MixedPrecisionPolicy()  # noqa: RUF009 - frozen
    overlap_grad_reduce: bool = True
    overlap_param_gather: bool = True
    sync_model_each_microbatch: bool = True
    preproc_state_dict_for_dcp_ckpt: bool = True
    report_nan_in_param_grad: bool = False
    average_in_collective: bool = False
    disable_bucketing: bool = False
    calculate_per_token_loss: bool = False
    keep_fp8_transpose_cache: bool = False
    nccl_ub: bool = False
    fsdp_double_buffer: bool = False
    fsdp_db_use_persist_buf_on_alloc_fail: bool = False
    disable_symmetric_registration: bool = False
    enable_fine_grained_param_gather: bool = False
    use_decoupled_grad: bool = False
    cuda_graph_mode: bool = False
    maxpool_double_buffer: bool = False
    _: KW_ONLY
    on_double_reduction: Literal["raise", "warn"] = "raise"
    transport: Transport = DEFAULT_TRANSPORT
    allocator: AllocatorName | None = None
    pool_slots: int = SMALLEST_POOL_SLOTS
    prefetch_order: OrderName | Sequence[str] = "recorded"
    prefetch_budget_bytes: int | None = None
    check_for_nan_in_grad: bool = False
    nested_units: NestedUnits = "outermost"
    manual_registration: bool = False
    unused_parameters: UnusedParameters = "none"

    @classmethod
    def among(cls, values: Mapping[str, Any]) -> Self:
        """Those among `values`, which may hold more."""
        return cls(**{one.name: values[one.name] for one in fields(cls) if one.name in values})


#: What every argument is unless it is given.
DEFAULT = ShardingArguments()
