"""The drop-in functions. Their flat arguments are parsed here, once, and go no further."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from mfsdp_core.plan.allocation import AllocatorName
from mfsdp_core.plan.config import Transport, UnusedParameters
from mfsdp_core.plan.prefetch import OrderName
from mfsdp_core.precision.policy import MixedPrecisionPolicy
from mfsdp_core.sharding import ShardingRequest
from mfsdp_core.sharding_arguments import DEFAULT, NestedUnits, ShardingArguments, UnitModules
from mfsdp_core.state.optimizer import check_replaceable, prepare_optimizer, replace_parameters
from mfsdp_core.state.whole_matrices import refuse_unserved
from mfsdp_core.wrapper import MegatronFSDP


def fully_shard_model(  # noqa: PLR0913, PLR0917 - the drop-in signature
    module: nn.Module,
    device_mesh: DeviceMesh | None = DEFAULT.device_mesh,
    dp_shard_dim: str | None = DEFAULT.dp_shard_dim,
    dp_outer_dim: str | None = DEFAULT.dp_outer_dim,
    tp_dim: str | None = DEFAULT.tp_dim,
    hybrid_fsdp_group: dist.ProcessGroup | None = DEFAULT.hybrid_fsdp_group,
    hybrid_fsdp_expt_group: dist.ProcessGroup | None = DEFAULT.hybrid_fsdp_expt_group,
    expt_device_mesh: DeviceMesh | None = DEFAULT.expt_device_mesh,
    fsdp_group_ag: dist.ProcessGroup | None = DEFAULT.fsdp_group_ag,
    expt_fsdp_group_ag: dist.ProcessGroup | None = DEFAULT.expt_fsdp_group_ag,
    fsdp_unit_modules: UnitModules | None = DEFAULT.fsdp_unit_modules,
    zero_dp_strategy: int | str = DEFAULT.zero_dp_strategy,
    outer_dp_sharding_strategy: int | str = DEFAULT.outer_dp_sharding_strategy,
    device: torch.device | str | int | None = DEFAULT.device,
    init_model_with_meta_device: bool = DEFAULT.init_model_with_meta_device,
    mixed_precision_policy: MixedPrecisionPolicy = DEFAULT.mixed_precision_policy,
    overlap_grad_reduce: bool = DEFAULT.overlap_grad_reduce,
    overlap_param_gather: bool = DEFAULT.overlap_param_gather,
    sync_model_each_microbatch: bool = DEFAULT.sync_model_each_microbatch,
    preproc_state_dict_for_dcp_ckpt: bool = DEFAULT.preproc_state_dict_for_dcp_ckpt,
    report_nan_in_param_grad: bool = DEFAULT.report_nan_in_param_grad,
    average_in_collective: bool = DEFAULT.average_in_collective,
    disable_bucketing: bool = DEFAULT.disable_bucketing,
    calculate_per_token_loss: bool = DEFAULT.calculate_per_token_loss,
    keep_fp8_transpose_cache: bool = DEFAULT.keep_fp8_transpose_cache,
    nccl_ub: bool = DEFAULT.nccl_ub,
    fsdp_double_buffer: bool = DEFAULT.fsdp_double_buffer,
    fsdp_db_use_persist_buf_on_alloc_fail: bool = DEFAULT.fsdp_db_use_persist_buf_on_alloc_fail,
    disable_symmetric_registration: bool = DEFAULT.disable_symmetric_registration,
    enable_fine_grained_param_gather: bool = DEFAULT.enable_fine_grained_param_gather,
    use_decoupled_grad: bool = DEFAULT.use_decoupled_grad,
    cuda_graph_mode: bool = DEFAULT.cuda_graph_mode,
    maxpool_double_buffer: bool = DEFAULT.maxpool_double_buffer,
    *,
    on_double_reduction: Literal["raise", "warn"] = DEFAULT.on_double_reduction,
    transport: Transport = DEFAULT.transport,
    allocator: AllocatorName | None = DEFAULT.allocator,
    pool_slots: int = DEFAULT.pool_slots,
    prefetch_order: OrderName | Sequence[str] = DEFAULT.prefetch_order,
    prefetch_budget_bytes: int | None = DEFAULT.prefetch_budget_bytes,
    check_for_nan_in_grad: bool = DEFAULT.check_for_nan_in_grad,
    nested_units: NestedUnits = DEFAULT.nested_units,
    manual_registration: bool = DEFAULT.manual_registration,
    unused_parameters: UnusedParameters = DEFAULT.unused_parameters,
) -> MegatronFSDP:
    """Shard `module` in place over a data-parallel mesh and wrap it.

    Collective: every rank of the mesh calls it with an equal module. Equal weights are the caller's
    business, as under upstream (seed all ranks alike, or call `broadcast_params`); others are
    warned of.

    device_mesh, dp_shard_dim: the mesh, and the name of the dimension to shard over (needed where
    the mesh has several); None is a mesh over all ranks. dp_outer_dim, hybrid_fsdp_group: the
    outer data-parallel dimension of hybrid sharding, and a process group over the ranks of both;
    one is refused without the other. Dimensions may be flattened ones, and the mesh may have more.
    tp_dim: the dimension of tensor parallelism, after the others; parameters that are DTensors on
    it, or marked as cut by hand, are sharded further. expt_device_mesh: the same dimensions, of the
    ranks that share an expert; hybrid_fsdp_expt_group and expt_fsdp_group_ag are to it what
    hybrid_fsdp_group and fsdp_group_ag are to device_mesh. Parameters with `allreduce = False`, or
    `.experts.` in their name, are experts'. outer_dp_sharding_strategy: 0 replicates over the outer
    dimension (HSDP), 1 shards the optimizer over it as well (HFSDP). fsdp_group_ag: process group
    over the ranks of the inner dimension for gathers alone. fsdp_unit_modules: classes, or import
    paths of classes, whose instances are sharded as one; what lies outside is the root's.
    zero_dp_strategy: 0 no_shard, 1 optim, 2 optim_grads, 3 optim_grads_params. device: where the
    module goes, None is the mesh's current device. init_model_with_meta_device: parameters on the
    meta device are made, initialised by their modules' reset_parameters and sharded, unit by unit.
    mixed_precision_policy: see `MixedPrecisionPolicy`. overlap_grad_reduce: reduce during the
    backward pass. overlap_param_gather: gather the next unit ahead of need.
    sync_model_each_microbatch: every backward pass ends its cycle (auto-sync).
    average_in_collective: let the collective divide by the number of ranks.
    cuda_graph_mode: keep what moves, and the host, out of a step, so that it can be captured (see
    `CapturedStep`); needs a pool, and makes gradients of unused parameters zeros.
    calculate_per_token_loss: sum gradients without dividing, whatever
    average_in_collective says. report_nan_in_param_grad: raise when a parameter's gradient holds
    NaN or Inf, as soon as it is computed; check_for_nan_in_grad: look once per buffer, before it is
    reduced. disable_bucketing: give every parameter a bucket of its own. use_decoupled_grad: attach
    reduced gradients as `decoupled_grad`, in the dtype of main gradients, for an optimizer that
    reads them there; `grad` stays None. on_double_reduction: `warn` restores upstream's behaviour,
    in which a whole gradient reduced twice in a cycle is wrong. transport: `native` collectives, or
    direct exchange by messages with a local FP32 sum, `point_to_point`; `auto` takes one of the
    two, and `model.transports` says which. allocator: who serves the buffers that come and go,
    one of `temporary`, `storage_resize`, `fixed_pool` and `max_pool` (README, Allocators); None is
    what upstream's flags say: `fsdp_double_buffer` the fixed pool, `maxpool_double_buffer` the max
    pool, neither `storage_resize`. pool_slots: slots of each pool.
    fsdp_db_use_persist_buf_on_alloc_fail: units that no slot serves keep their buffers, instead of
    resizing their storage.
    enable_fine_grained_param_gather: gather a unit's buckets module by module, as modules run that
    need them, rather than at the start of the unit (README, Gathering by module).
    prefetch_order: the order in which units are expected to run: as the first complete pass ran
    them (`recorded`), as they are registered (`static`), or their names in the order given.
    nccl_ub: allocate what collectives use in memory of NCCL's and register it, as symmetric windows
    unless disable_symmetric_registration says plain buffers; implies fsdp_double_buffer, and sums
    with local scaling instead of averages. What a group did not get is warned of, and in
    `buffer_registration` of the model. manual_registration: leave registering to the caller, who
    calls `param_and_grad_buffer.manual_buffer_registration()` once, after the first iteration.
    prefetch_budget_bytes: gather units ahead as long as those that have not run yet stay within it;
    None is the next unit. unused_parameters: gradient of a parameter that no rank has used in a
    cycle: `none` as in plain torch, so that optimizers leave it alone, which ranks find out by one
    small reduction per cycle; `zero` without it.

    Raises:
        ConfigurationError: an argument that cannot mean anything.
        CapabilityNotBuiltError: an argument whose capability this version lacks.
    """
    arguments = ShardingArguments.among(locals())
    return MegatronFSDP(module, ShardingRequest.parse(arguments))


def fully_shard_optimizer(
    optimizer: torch.optim.Optimizer,
    preproc_state_dict_for_dcp_ckpt: bool = True,
    *,
    whole_matrices: bool | None = None,
) -> torch.optim.Optimizer:
    """Make an optimizer over sharded parameters finish gradients and refresh weights around a step.

    whole_matrices: step on whole tensors, each on one rank; None is for torch's Muon and Adafactor.
    See `mfsdp_core.state.optimizer.prepare_optimizer`. Returns the same optimizer.
    """
    del preproc_state_dict_for_dcp_ckpt  # both values describe shards; see README, Checkpoints
    return prepare_optimizer(optimizer, whole_matrices=whole_matrices)


def fully_shard(  # noqa: PLR0913, PLR0917 - the drop-in signature
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    device_mesh: DeviceMesh | None = DEFAULT.device_mesh,
    dp_shard_dim: str | None = DEFAULT.dp_shard_dim,
    dp_outer_dim: str | None = DEFAULT.dp_outer_dim,
    tp_dim: str | None = DEFAULT.tp_dim,
    hybrid_fsdp_group: dist.ProcessGroup | None = DEFAULT.hybrid_fsdp_group,
    hybrid_fsdp_expt_group: dist.ProcessGroup | None = DEFAULT.hybrid_fsdp_expt_group,
    expt_device_mesh: DeviceMesh | None = DEFAULT.expt_device_mesh,
    fsdp_group_ag: dist.ProcessGroup | None = DEFAULT.fsdp_group_ag,
    expt_fsdp_group_ag: dist.ProcessGroup | None = DEFAULT.expt_fsdp_group_ag,
    fsdp_unit_modules: UnitModules | None = DEFAULT.fsdp_unit_modules,
    zero_dp_strategy: int | str = DEFAULT.zero_dp_strategy,
    outer_dp_sharding_strategy: int | str = DEFAULT.outer_dp_sharding_strategy,
    device: torch.device | str | int | None = DEFAULT.device,
    init_model_with_meta_device: bool = DEFAULT.init_model_with_meta_device,
    mixed_precision_policy: MixedPrecisionPolicy = DEFAULT.mixed_precision_policy,
    overlap_grad_reduce: bool = DEFAULT.overlap_grad_reduce,
    overlap_param_gather: bool = DEFAULT.overlap_param_gather,
    sync_model_each_microbatch: bool = DEFAULT.sync_model_each_microbatch,
    preproc_state_dict_for_dcp_ckpt: bool = DEFAULT.preproc_state_dict_for_dcp_ckpt,
    report_nan_in_param_grad: bool = DEFAULT.report_nan_in_param_grad,
    average_in_collective: bool = DEFAULT.average_in_collective,
    disable_bucketing: bool = DEFAULT.disable_bucketing,
    calculate_per_token_loss: bool = DEFAULT.calculate_per_token_loss,
    keep_fp8_transpose_cache: bool = DEFAULT.keep_fp8_transpose_cache,
    nccl_ub: bool = DEFAULT.nccl_ub,
    fsdp_double_buffer: bool = DEFAULT.fsdp_double_buffer,
    fsdp_db_use_persist_buf_on_alloc_fail: bool = DEFAULT.fsdp_db_use_persist_buf_on_alloc_fail,
    disable_symmetric_registration: bool = DEFAULT.disable_symmetric_registration,
    enable_fine_grained_param_gather: bool = DEFAULT.enable_fine_grained_param_gather,
    use_decoupled_grad: bool = DEFAULT.use_decoupled_grad,
    cuda_graph_mode: bool = DEFAULT.cuda_graph_mode,
    maxpool_double_buffer: bool = DEFAULT.maxpool_double_buffer,
    *,
    on_double_reduction: Literal["raise", "warn"] = DEFAULT.on_double_reduction,
    transport: Transport = DEFAULT.transport,
    allocator: AllocatorName | None = DEFAULT.allocator,
    pool_slots: int = DEFAULT.pool_slots,
    prefetch_order: OrderName | Sequence[str] = DEFAULT.prefetch_order,
    prefetch_budget_bytes: int | None = DEFAULT.prefetch_budget_bytes,
    check_for_nan_in_grad: bool = DEFAULT.check_for_nan_in_grad,
    nested_units: NestedUnits = DEFAULT.nested_units,
    manual_registration: bool = DEFAULT.manual_registration,
    unused_parameters: UnusedParameters = DEFAULT.unused_parameters,
) -> tuple[MegatronFSDP, torch.optim.Optimizer]:
    """`fully_shard_model` and `fully_shard_optimizer` in one call.

    The optimizer was built over `module`'s parameters and has not stepped; its parameter groups and
    their options are kept.

    Raises:
        ConfigurationError: as the two functions, or an optimizer with state or foreign parameters.
    """
    request = ShardingRequest.parse(ShardingArguments.among(locals()))
    check_replaceable(optimizer, module.parameters())
    refuse_unserved(optimizer)
    model = MegatronFSDP(module, request)
    replace_parameters(optimizer, model.sharded_by_original())
    return model, fully_shard_optimizer(optimizer, preproc_state_dict_for_dcp_ckpt)
