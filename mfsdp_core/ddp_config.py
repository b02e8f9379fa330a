"""Upstream's configuration dataclass, and what its fields are called here."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, fields
from typing import Any, Self

import torch

from mfsdp_core.errors import ConfigurationError
from mfsdp_core.plan.strategy import parse_strategy
from mfsdp_core.precision.policy import MixedPrecisionPolicy
from mfsdp_core.sharding_arguments import ShardingArguments

#: Field -> argument of `fully_shard_model` that means the same.
_ARGUMENTS = {
    "overlap_grad_reduce": "overlap_grad_reduce",
    "overlap_param_gather": "overlap_param_gather",
    "check_for_nan_in_grad": "check_for_nan_in_grad",
    "average_in_collective": "average_in_collective",
    "data_parallel_sharding_strategy": "zero_dp_strategy",
    "outer_dp_sharding_strategy": "outer_dp_sharding_strategy",
    "keep_fp8_transpose_cache": "keep_fp8_transpose_cache",
    "nccl_ub": "nccl_ub",
    "fsdp_double_buffer": "fsdp_double_buffer",
    "fsdp_db_use_persist_buf_on_alloc_fail": "fsdp_db_use_persist_buf_on_alloc_fail",
    "disable_symmetric_registration": "disable_symmetric_registration",
    "fsdp_manual_registration": "manual_registration",
    "megatron_fsdp_use_decoupled_grad": "use_decoupled_grad",
    "megatron_fsdp_cuda_graph_mode": "cuda_graph_mode",
    "megatron_fsdp_enable_fine_grained_param_gather": "enable_fine_grained_param_gather",
    "megatron_fsdp_max_pool_double_buffer": "maxpool_double_buffer",
}
#: Field -> why it changes nothing here. They are about speed alone.
_WITHOUT_EFFECT = {
    "bucket_size": "the parameters of a unit and dtype travel together, whatever their size",
    "suggested_communication_unit_size": "use prefetch_budget_bytes of fully_shard_model",
    "gradient_reduce_div_fusion": "the division is always a part of the reduction's input",
    "fsdp_all_gather_in_start_param_sync": "start_param_sync always gathers",
    "fp8_param_gather": "weights kept as codes are always gathered as codes, and others never",
}
#: Field -> field of the policy that decides.
_DTYPES = {
    "megatron_fsdp_main_params_dtype": "main_params_dtype",
    "megatron_fsdp_main_grads_dtype": "main_grads_dtype",
    "megatron_fsdp_grad_comm_dtype": "grad_comm_dtype",
}


@dataclass
class DistributedDataParallelConfig:
    """How `MegatronFSDP(module, dist_index, ddp_config)` shards; names and defaults are upstream's.

    bucket_size, suggested_communication_unit_size: in elements. docs/drop_in_differences.md says
    which fields are refused or have no effect; the rest is described by `fully_shard_model`.
    """

    overlap_grad_reduce: bool = False
    overlap_param_gather: bool = False
    check_for_nan_in_grad: bool = False
    bucket_size: int | None = None
    average_in_collective: bool = False
    fp8_param_gather: bool = False
    data_parallel_sharding_strategy: str = "no_shard"
    gradient_reduce_div_fusion: bool = True
    suggested_communication_unit_size: int | None = None
    keep_fp8_transpose_cache: bool = False
    nccl_ub: bool = False
    fsdp_double_buffer: bool = False
    fsdp_all_gather_in_start_param_sync: bool = True
    fsdp_db_use_persist_buf_on_alloc_fail: bool = False
    outer_dp_sharding_strategy: str = "no_shard"
    disable_symmetric_registration: bool = False
    fsdp_manual_registration: bool = False
    megatron_fsdp_main_params_dtype: torch.dtype | None = torch.float32
    megatron_fsdp_main_grads_dtype: torch.dtype | None = None
    megatron_fsdp_grad_comm_dtype: torch.dtype | None = None
    megatron_fsdp_use_decoupled_grad: bool = False
    megatron_fsdp_cuda_graph_mode: bool = False
    megatron_fsdp_enable_fine_grained_param_gather: bool = False
    megatron_fsdp_max_pool_double_buffer: bool = False

    def __post_init__(self) -> None:
        """A pool of the largest units is a double buffer too, as under upstream."""
        self.fsdp_double_buffer |= self.megatron_fsdp_max_pool_double_buffer

    @classmethod
    def of_arguments(cls, arguments: ShardingArguments) -> Self:
        """What the arguments of `fully_shard_model` say, strategies by name."""
        policy = arguments.mixed_precision_policy
        return cls(
            **{field: getattr(arguments, name) for field, name in _ARGUMENTS.items()},
            **{field: getattr(policy, name) for field, name in _DTYPES.items()},
        )

    def arguments(self, policy: MixedPrecisionPolicy) -> dict[str, Any]:
        """The arguments of `fully_shard_model` that mean the same, beside `policy`.

        Sharded gradients are always reduced, and sharded weights always gathered, while the model
        computes, as under upstream.

        Raises:
            ConfigurationError: a dtype that is neither the default nor that of `policy`.
        """
        self._refuse(policy)
        self._warn()
        found = {name: getattr(self, field) for field, name in _ARGUMENTS.items()}
        axis = parse_strategy(self.data_parallel_sharding_strategy).inner
        found["overlap_grad_reduce"] |= axis.reduces_every_microbatch
        found["overlap_param_gather"] |= axis.gathers_every_use
        return found

    def _refuse(self, policy: MixedPrecisionPolicy) -> None:
        for name, wanted in _DTYPES.items():
            value = getattr(self, name)
            if value not in (_default(name), getattr(policy, wanted)):
                raise ConfigurationError(
                    f"ddp_config.{name} is {value} and mixed_precision_policy.{wanted} is "
                    f"{getattr(policy, wanted)}. The policy decides: say it there."
                )

    def _warn(self) -> None:
        for name, reason in _WITHOUT_EFFECT.items():
            value = getattr(self, name)
            if value != _default(name):
                warnings.warn(
                    f"ddp_config.{name}={value} has no effect: {reason}.", UserWarning, stacklevel=4
                )


def _default(name: str) -> object:
    return next(f.default for f in fields(DistributedDataParallelConfig) if f.name == name)
