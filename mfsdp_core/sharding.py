"""From the flat arguments of the public functions to a sharded module."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Collection
from dataclasses import dataclass
from typing import get_args

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter

from mfsdp_core.comm.mesh import AxisNames, dense_axes, expert_axes, target_device
from mfsdp_core.errors import ConfigurationError
from mfsdp_core.events import EventBus
from mfsdp_core.memory.ledger import MemoryLedger
from mfsdp_core.plan.allocation import RegistrationConfig, parse_allocation
from mfsdp_core.plan.config import ReductionConfig, ScheduleConfig, ShardingConfig
from mfsdp_core.plan.strategy import parse_strategy
from mfsdp_core.precision.policy import MixedPrecisionPolicy
from mfsdp_core.runtime.build import Environment, build_context
from mfsdp_core.runtime.context import ShardedContext
from mfsdp_core.runtime.meta_init import check_meta_tensors, move_real_tensors
from mfsdp_core.runtime.units import resolve_unit_classes, select_units
from mfsdp_core.shard.chunk import offsets_of
from mfsdp_core.shard.dtensor import local_tensor
from mfsdp_core.sharding_arguments import NestedUnits, ShardingArguments
from mfsdp_core.streams import Streams


@dataclass(frozen=True)
class ShardingRequest:
    """The arguments of `fully_shard_model`, checked; nothing has been touched yet.

    arguments: as given. unit_classes: of `fsdp_unit_modules`.
    """

    arguments: ShardingArguments
    config: ShardingConfig
    unit_classes: tuple[type[nn.Module], ...]

    @classmethod
    def parse(cls, arguments: ShardingArguments) -> ShardingRequest:
        """Check what can be checked without a module and without ranks.

        Raises:
            ConfigurationError: see `fully_shard_model`.
        """
        policy = arguments.mixed_precision_policy
        if not isinstance(policy, MixedPrecisionPolicy):
            raise ConfigurationError(
                "mixed_precision_policy: expected mfsdp_core.MixedPrecisionPolicy, found "
                f"{type(policy).__name__}."
            )
        for name, given, choices in (
            ("on_double_reduction", arguments.on_double_reduction, ("raise", "warn")),
            ("nested_units", arguments.nested_units, get_args(NestedUnits)),
        ):
            if given not in choices:
                expected = " or ".join(map(repr, choices))
                raise ConfigurationError(f"{name}={given!r}: expected {expected}.")
        classes = resolve_unit_classes(arguments.fsdp_unit_modules)
        return cls(arguments, _config(arguments), classes)


def shard_module(module: nn.Module, request: ShardingRequest) -> tuple[ShardedContext, Environment]:
    """Shard `module` in place, and say where. Collective.

    Raises:
        ConfigurationError: see `fully_shard_model`.
    """
    arguments, config = request.arguments, request.config
    units = select_units(module, request.unit_classes, nested=arguments.nested_units == "all")
    check_meta_tensors(
        module,
        allowed=arguments.init_model_with_meta_device,
        sharded=config.strategy.inner.shards_optimizer,
    )
    _refuse_sharded(module)
    environment = environment_of(arguments)
    prepare_tensors(module, environment.streams.device)
    policy = arguments.mixed_precision_policy
    return build_context(module, units, config, policy, environment), environment


def prepare_tensors(
    module: nn.Module, device: torch.device, left_alone: Collection[nn.Parameter] = ()
) -> None:
    """Bring what `module` has to `device`, what is on the meta device or left alone apart.

    Raises:
        ConfigurationError: a parameter without a shape.
    """
    _refuse_lazy(module)
    _say_what_becomes_contiguous(module)
    move_real_tensors(module, device, left_alone)


def _refuse_lazy(module: nn.Module) -> None:
    lazy = [name for name, p in module.named_parameters() if isinstance(p, UninitializedParameter)]
    if lazy:
        raise ConfigurationError(
            f"{len(lazy)} parameters (the first is {lazy[0]}) have no shape before the first "
            "forward pass (torch's lazy modules). Run the module once before sharding it."
        )


def _refuse_sharded(module: nn.Module) -> None:
    named = list(module.named_parameters())
    sharded = [name for name, p in named if offsets_of(p) is not None]
    if sharded:
        raise ConfigurationError(
            f"{len(sharded)} parameters (the first is {sharded[0]}) are sharded already. A module "
            "is sharded once: use the model that this returned, or build another module."
        )
    refuse_shared(module)


def refuse_shared(module: nn.Module) -> None:
    """Refuse parameters whose memory is another sharded module's.

    Raises:
        ConfigurationError: there are some.
    """
    named = module.named_parameters()
    shared = [
        name for name, p in named if getattr(p, "__fsdp_param__", False) and offsets_of(p) is None
    ]
    if shared:
        raise ConfigurationError(
            f"{len(shared)} parameters (the first is {shared[0]}) are also in a module that is "
            "sharded already, whose buffers they are part of. Put both modules into one, and shard "
            "that, or give each module parameters of its own."
        )


def _say_what_becomes_contiguous(module: nn.Module) -> None:
    """Warn, once per model, of weights in another memory format (channels_last)."""
    names = [
        name
        for name, parameter in module.named_parameters()
        if not parameter.is_meta
        and not local_tensor(parameter).is_contiguous()
        # One element that is expanded, in place of values that come later, has no format.
        and 0 not in local_tensor(parameter).stride()
    ]
    if names:
        warnings.warn(
            f"{len(names)} parameters (the first is {names[0]}) are not contiguous, as in "
            "channels_last. Sharded weights are whole rows of flat buffers and become contiguous: "
            "results are the same, and the choice of kernels may change.",
            UserWarning,
            stacklevel=5,
        )


def _config(arguments: ShardingArguments) -> ShardingConfig:
    order = arguments.prefetch_order
    schedule = ScheduleConfig(
        prefetch=arguments.overlap_param_gather,
        overlap_reduction=arguments.overlap_grad_reduce,
        auto_sync=arguments.sync_model_each_microbatch,
        strict_reduction=arguments.on_double_reduction == "raise",
        prefetch_order=order if isinstance(order, str) else tuple(order),
        prefetch_budget_bytes=arguments.prefetch_budget_bytes,
        gather_by_module=arguments.enable_fine_grained_param_gather,
    )
    registration = _registration(arguments)
    # Symmetric kernels add up; an average would run another kernel.
    sums = registration is not None and registration.symmetric
    is_captured = bool(arguments.cuda_graph_mode)
    reduction = ReductionConfig(
        arguments.average_in_collective and not sums,
        arguments.calculate_per_token_loss,
        arguments.transport,
        arguments.use_decoupled_grad,
        # A graph knows no None: gradients are there at every replay, as under upstream.
        "zero" if is_captured else arguments.unused_parameters,
        by_collectives=registration is not None or is_captured,
    )
    allocation = parse_allocation(
        arguments.allocator,
        arguments.pool_slots,
        double_buffer=arguments.fsdp_double_buffer or registration is not None,
        max_pool=arguments.maxpool_double_buffer,
        persistent_fallback=arguments.fsdp_db_use_persist_buf_on_alloc_fail,
        registration=registration,
    )
    if is_captured:
        # What no slot serves, such as buckets of the root, must stay where it is as well.
        allocation = dataclasses.replace(allocation, persistent_fallback=True)
    return ShardingConfig(
        parse_strategy(arguments.zero_dp_strategy, arguments.outer_dp_sharding_strategy),
        reduction,
        schedule,
        allocation,
        bucketing=not arguments.disable_bucketing,
        checks_each_parameter=arguments.report_nan_in_param_grad,
        checks_before_reduction=arguments.check_for_nan_in_grad,
        keeps_transposes=arguments.keep_fp8_transpose_cache,
        has_outer_axis=arguments.dp_outer_dim is not None,
        has_codec=arguments.mixed_precision_policy.weight_codec is not None,
        is_captured=is_captured,
    )


def _registration(arguments: ShardingArguments) -> RegistrationConfig | None:
    """What `nccl_ub` and its switches ask for.

    Raises:
        ConfigurationError: for messages from rank to rank, which no registration speeds up.
    """
    if not arguments.nccl_ub:
        return None
    if arguments.transport == "point_to_point":
        raise ConfigurationError(
            "nccl_ub registers memory for NCCL's collectives, and "
            f"transport={arguments.transport!r} uses none. Use transport='native'."
        )
    return RegistrationConfig(
        symmetric=not arguments.disable_symmetric_registration,
        manual=arguments.manual_registration,
    )


def environment_of(arguments: ShardingArguments) -> Environment:
    """The meshes and the device that the arguments name.

    Raises:
        ConfigurationError: they name none that there are.
    """
    names = AxisNames(arguments.dp_shard_dim, arguments.dp_outer_dim, arguments.tp_dim)
    dense = dense_axes(
        arguments.device_mesh, names, arguments.hybrid_fsdp_group, arguments.fsdp_group_ag
    )
    experts = expert_axes(
        arguments.expt_device_mesh,
        names,
        arguments.hybrid_fsdp_expt_group,
        arguments.expt_fsdp_group_ag,
        dense,
    )
    target = target_device(arguments.device, dense.mesh)
    return Environment(dense, experts, Streams.of(target), EventBus(), MemoryLedger())
