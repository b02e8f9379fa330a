"""From a module and a configuration to groups, units and the context that runs them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from mfsdp_core.comm.axes import AxisCommunicators
from mfsdp_core.comm.point_to_point import PointToPointCommunicator
from mfsdp_core.comm.protocol import Communicator, Scratch
from mfsdp_core.comm.torch_backend import TorchCommunicator, dtype_name
from mfsdp_core.errors import CapabilityNotBuiltError
from mfsdp_core.events import EventBus
from mfsdp_core.memory.allocation import build_allocators
from mfsdp_core.memory.ledger import MemoryLedger
from mfsdp_core.memory.scratch import AllocatedScratch
from mfsdp_core.plan.config import ShardingConfig, Transport
from mfsdp_core.plan.coordinate import Coordinate
from mfsdp_core.plan.dtype_policy import GroupDtypes, resolve_bucket_dtypes
from mfsdp_core.plan.grouping import ROOT, BucketPlan, ParameterFacts, plan_buckets
from mfsdp_core.plan.prefetch import PrefetchOrder
from mfsdp_core.plan.strategy import AxisPlacements, Collective, Strategy
from mfsdp_core.precision.policy import MixedPrecisionPolicy
from mfsdp_core.runtime.bucket import BucketSpec
from mfsdp_core.runtime.context import ShardedContext
from mfsdp_core.runtime.grad_pipeline import GradPipeline
from mfsdp_core.runtime.gradient_buffers import GradientBuffers
from mfsdp_core.runtime.hooks import attach_hooks
from mfsdp_core.runtime.nan_guard import NanGuard
from mfsdp_core.runtime.param_pipeline import ParamPipeline
from mfsdp_core.runtime.parameter_group import ManagedParameter, ParameterGroup
from mfsdp_core.runtime.pool_requests import FEWER_SLOTS, pool_requests, pooled_dtypes
from mfsdp_core.runtime.units import Unit
from mfsdp_core.runtime.weight_buffers import WeightBuffers


@dataclass(frozen=True)
class Environment:
    """Where a model is sharded.

    mesh: (inner,) or (outer, inner). gather_group None: gathers share the inner axis' group.
    """

    mesh: DeviceMesh
    device: torch.device
    gather_group: dist.ProcessGroup | None
    events: EventBus
    ledger: MemoryLedger

    @property
    def has_outer_axis(self) -> bool:
        """Whether the mesh has two axes, whatever their sizes."""
        return self.mesh.ndim == 2  # noqa: PLR2004 - outer and inner

    def coordinate(self) -> Coordinate:
        """This rank's place on the mesh."""
        inner = self.mesh.ndim - 1
        return Coordinate(
            inner_rank=self.mesh.get_local_rank(inner),
            inner_size=self.mesh.size(inner),
            outer_rank=self.mesh.get_local_rank(0) if self.has_outer_axis else 0,
            outer_size=self.mesh.size(0) if self.has_outer_axis else 1,
        )

    def communicators(
        self, strategy: Strategy, transport: Transport, scratch: Scratch
    ) -> AxisCommunicators:
        """One per purpose; all publish to `events`.

        `auto` exchanges directly on gloo, except along an axis that all-reduces: there the second
        half of a direct exchange cannot overlap with the backward pass.
        """

        def over(group: dist.ProcessGroup, role: str, axis: AxisPlacements) -> Communicator:
            on_gloo = dist.get_backend(group) == "gloo"
            pays_off = on_gloo and axis.reduction is not Collective.ALL_REDUCE
            if transport == "point_to_point" or (transport == "auto" and pays_off):
                return PointToPointCommunicator(group, role, self.events, scratch)
            return TorchCommunicator(group, role, self.events)

        inner = over(self.mesh.get_group(self.mesh.ndim - 1), "inner", strategy.inner)
        gather = inner
        if self.gather_group is not None:
            gather = over(self.gather_group, "inner", strategy.inner)
        outer = None
        if self.has_outer_axis:
            outer = over(self.mesh.get_group(0), "outer", strategy.outer)
        return AxisCommunicators(inner, gather, outer)


def group_dtypes(
    compute: torch.dtype, policy: MixedPrecisionPolicy, *, trainable: bool
) -> GroupDtypes[torch.dtype]:
    """Dtypes of a bucket under `policy`."""
    return resolve_bucket_dtypes(
        compute,
        policy.main_params_dtype,
        policy.main_grads_dtype,
        policy.grad_comm_dtype,
        trainable=trainable,
    )


def build_context(
    module: nn.Module,
    unit_modules: Iterable[tuple[str, nn.Module]],
    config: ShardingConfig,
    policy: MixedPrecisionPolicy,
    environment: Environment,
) -> ShardedContext:
    """Shard `module` in place and hook it."""
    root = Unit(ROOT, module, place=None)
    units = [Unit(name, child, place) for place, (name, child) in enumerate(unit_modules)]
    by_name = {unit.name: unit for unit in (root, *units)}
    collected = _collect(module, {id(unit.module): unit.name for unit in units})
    parameters = [managed for managed, _ in collected]
    pieces = environment.coordinate().pieces(config.strategy)
    facts = [_facts(managed, owners) for managed, owners in collected]
    plans = plan_buckets(facts, pieces, bucketing=config.bucketing)
    members = {plan.name: [parameters[index] for index in plan.members] for plan in plans}
    factory = _GroupFactory(config, policy, environment, plans, members)
    for plan in plans:
        by_name[plan.unit].groups.append(factory.build(plan, members[plan.name]))
    for pool in factory.allocators.pools.values():
        pool.forget_assignments()
    events, schedule = environment.events, config.schedule
    context = ShardedContext(
        root,
        units,
        ParamPipeline(root, units, PrefetchOrder(len(units)), events, prefetch=schedule.prefetch),
        GradPipeline(root, units, overlap=schedule.overlap_reduction, guard=factory.guard),
        events=events,
        auto_sync=schedule.auto_sync,
        allocators=factory.allocators,
    )
    for unit in (root, *units):
        unit.show_sharded()
    attach_hooks(context)
    return context


class _GroupFactory:
    """Builds the run-time side of bucket plans; holds what all of them share."""

    def __init__(
        self,
        config: ShardingConfig,
        policy: MixedPrecisionPolicy,
        environment: Environment,
        plans: list[BucketPlan],
        members: dict[str, list[ManagedParameter]],
    ) -> None:
        self._config = config
        self._policy = policy
        self._environment = environment
        self._coordinate = environment.coordinate()
        self.guard = NanGuard(
            environment.mesh.get_rank(),
            each_parameter=config.checks.each_parameter,
            before_reduction=config.checks.before_reduction,
        )
        self._specs = {plan.name: self._spec(plan, members[plan.name]) for plan in plans}
        specs = self._specs.values()
        self.allocators = build_allocators(
            config.allocation,
            pool_requests(specs, has_outer_axis=environment.has_outer_axis),
            pooled_dtypes(specs),
            FEWER_SLOTS,
            device=environment.device,
            ledger=environment.ledger,
        )
        self._communicators = environment.communicators(
            config.strategy,
            config.reduction.transport,
            AllocatedScratch(self.allocators.scratch),
        )

    def _spec(self, plan: BucketPlan, members: list[ManagedParameter]) -> BucketSpec:
        compute = members[0].raw.dtype
        dtypes = group_dtypes(compute, self._policy, trainable=plan.requires_grad)
        return BucketSpec(plan, self._config.strategy, self._coordinate, dtypes)

    def build(self, plan: BucketPlan, members: list[ManagedParameter]) -> ParameterGroup:
        """The group of `plan`, its parameters moved into its buffers."""
        environment, spec = self._environment, self._specs[plan.name]
        weights = WeightBuffers(
            spec,
            self._communicators,
            self.allocators,
            persistent=plan.unit == ROOT,
            events=environment.events,
        )
        gradients = None
        if plan.requires_grad:
            gradients = GradientBuffers(
                spec,
                self._communicators,
                self.allocators,
                reduction=self._config.reduction,
                strict=self._config.schedule.strict_reduction,
                guard=self.guard.for_bucket([managed.names for managed in members]),
                events=environment.events,
            )
        return ParameterGroup(
            spec,
            members,
            weights,
            gradients,
            mesh=environment.mesh,
            allocator=self.allocators.lasting,
            decoupled=self._config.reduction.decoupled,
        )


@dataclass
class _Found:
    """One physical parameter, with every path that leads to it."""

    raw: nn.Parameter
    names: list[str]
    units: list[str]
    holders: dict[tuple[int, str], nn.Module]


def _collect(
    root: nn.Module, units: dict[int, str]
) -> list[tuple[ManagedParameter, tuple[str, ...]]]:
    """Physical parameters in registration order, and the unit of each of their names.

    units: id of a unit's module -> its name. A module that is registered under several parents is
    visited once per path, since its parameters may then belong to several units.
    """
    found: dict[int, _Found] = {}

    def visit(module: nn.Module, path: str, unit: str) -> None:
        unit = units.get(id(module), unit)
        for attribute, parameter in module._parameters.items():
            if parameter is None:
                continue
            name = f"{path}.{attribute}" if path else attribute
            _refuse_unsupported(name, parameter)
            entry = found.setdefault(id(parameter), _Found(parameter, [], [], {}))
            entry.names.append(name)
            entry.units.append(unit)
            entry.holders[id(module), attribute] = module
        for attribute, child in module._modules.items():
            if child is not None:
                visit(child, f"{path}.{attribute}" if path else attribute, unit)

    visit(root, "", ROOT)
    return [
        (
            ManagedParameter(
                tuple(entry.names),
                tuple((holder, attribute) for (_, attribute), holder in entry.holders.items()),
                entry.raw,
            ),
            tuple(entry.units),
        )
        for entry in found.values()
    ]


def _refuse_unsupported(name: str, parameter: nn.Parameter) -> None:
    if isinstance(parameter, DTensor):
        raise CapabilityNotBuiltError(
            f"{name} is a DTensor already (tensor parallelism beside sharding is not built)."
        )
    if parameter.is_meta:
        raise CapabilityNotBuiltError(
            f"{name} is on the meta device (meta initialisation is not built). "
            "Materialise the model before sharding it."
        )


def _facts(managed: ManagedParameter, units: tuple[str, ...]) -> ParameterFacts:
    raw = managed.raw
    return ParameterFacts(
        managed.names, units, tuple(raw.shape), dtype_name(raw.dtype), raw.requires_grad
    )
