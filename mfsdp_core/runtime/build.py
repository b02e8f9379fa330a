"""From a module and a configuration to buckets, units and the context that runs them."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice

import torch
from torch import nn

from mfsdp_core.comm.data_parallel import DataParallelAxes
from mfsdp_core.comm.rendezvous import OrderAgreement
from mfsdp_core.comm.symmetric import UserBuffers, user_buffers
from mfsdp_core.comm.torch_backend import dtype_name
from mfsdp_core.comm.usage import Usage
from mfsdp_core.errors import CapabilityNotBuiltError, ConfigurationError, Refusal, refuse
from mfsdp_core.events import EventBus
from mfsdp_core.memory.allocation import Allocators
from mfsdp_core.memory.ledger import MemoryLedger
from mfsdp_core.plan.dtype_policy import GroupDtypes, is_wider
from mfsdp_core.plan.grouping import (
    ROOT,
    BucketPlan,
    ParameterFacts,
    nearest_common_unit,
    plan_buckets,
)
from mfsdp_core.plan.options import Options
from mfsdp_core.plan.payload import BOTH, WEIGHTS, Payload
from mfsdp_core.plan.prefetch import PrefetchOrder, unit_order
from mfsdp_core.precision.codec import BucketCodec, Plain, Shard
from mfsdp_core.precision.transformer_engine import (
    PrimaryBucket,
    check_primary,
    payloads_of,
    primary_kind,
)
from mfsdp_core.runtime.bucket import Bucket
from mfsdp_core.runtime.bucket_spec import BucketSpec, group_dtypes
from mfsdp_core.runtime.context import ShardedContext
from mfsdp_core.runtime.gathering import ScheduleByModule, readers_of
from mfsdp_core.runtime.gradient_buffers import GradientBuffers
from mfsdp_core.runtime.hooks import attach_hooks
from mfsdp_core.runtime.meta_init import MetaInitialiser
from mfsdp_core.runtime.nan_guard import NanGuard
from mfsdp_core.runtime.parameters import ManagedParameter, move_parameters, warn_of_unequal
from mfsdp_core.runtime.reductions import Reductions
from mfsdp_core.runtime.schedule import Schedule
from mfsdp_core.runtime.units import Unit, nest_units
from mfsdp_core.runtime.weight_buffers import WeightBuffers
from mfsdp_core.shard.chunk import offsets_of
from mfsdp_core.shard.experts import ExpertScope, is_expert, mark_expert
from mfsdp_core.shard.tensor_parallel import tensor_part
from mfsdp_core.streams import Streams


@dataclass(frozen=True)
class Environment:
    """Where a model is sharded.

    dense: the axes of all parameters but experts'. experts: theirs, None where every rank has all.
    """

    dense: DataParallelAxes
    experts: DataParallelAxes | None
    streams: Streams
    events: EventBus
    ledger: MemoryLedger

    def axes(self, *, is_expert: bool) -> DataParallelAxes:
        """The axes of one kind of parameters."""
        return self.experts if is_expert and self.experts is not None else self.dense

    @property
    def all_axes(self) -> list[DataParallelAxes]:
        """The axes of both kinds."""
        return [axes for axes in (self.dense, self.experts) if axes is not None]


def build_context(
    module: nn.Module,
    unit_modules: Iterable[tuple[str, nn.Module]],
    options: Options,
    environment: Environment,
) -> ShardedContext:
    """Shard `module` in place and hook it."""
    root = Unit(ROOT, module, index=None)
    units = [Unit(name, child, index=None) for name, child in unit_modules]
    return run_units(root, units, shard_units(root, units, options, environment))


def shard_units(
    root: Unit,
    units: list[Unit],
    options: Options,
    environment: Environment,
    *,
    left_alone: Collection[nn.Parameter] = (),
    initialises: bool = True,
) -> BucketFactory:
    """Move the parameters of `root.module` into buckets of `root` and of `units` inside it.

    left_alone: parameters that stay as they are. What is a shard already is another unit's.
    initialises: whether modules on the meta device make and draw their parameters now.
    """
    names = {id(unit.module): unit.name for unit in units}
    collected = _collect(root, names, {id(parameter) for parameter in left_alone})
    readers = readers_of(root.module) if options.enable_fine_grained_param_gather else {}
    policy = options.mixed_precision_policy
    managed_facts = [_manage(held, environment, options, readers) for held in collected]
    parameters = [managed for managed, _ in managed_facts]
    for axes in environment.all_axes:
        own = [m for m, f in managed_facts if environment.axes(is_expert=f.is_expert) is axes]
        warn_of_unequal(own, axes)
    dense, experts = (
        environment.axes(is_expert=kind).coordinate().sub_shards(options.strategy)
        for kind in (False, True)
    )
    plans = plan_buckets(
        [facts for _, facts in managed_facts],
        dense,
        expert_slices=experts,
        bucketing=not options.disable_bucketing,
        codec=policy.weight_codec,
    )
    owners = {plan.unit for plan in plans}
    order = options.prefetch_order
    # Refused before anything is changed.
    given = unit_order(
        order if isinstance(order, str) else tuple(order),
        [unit.name for unit in units if unit.name in owners],
    )
    members = {plan.name: [parameters[index] for index in plan.members] for plan in plans}
    factory = BucketFactory(options, environment, plans, members, given)
    ready: Iterable[BucketPlan] = plans
    if initialises:
        device = environment.streams.device
        ready = MetaInitialiser(root.module, parameters, device).ready_plans(plans, names)
    buckets = {plan.name: factory.build(plan, members[plan.name]) for plan in ready}
    by_name = {unit.name: unit for unit in (root, *units)}
    for plan in plans:
        by_name[plan.unit].buckets.append(buckets[plan.name])
    for pool in factory.allocators.pools.values():
        pool.forget_assignments()
    for unit in by_name.values():
        unit.show_sharded()
    return factory


def run_units(root: Unit, units: list[Unit], factory: BucketFactory) -> ShardedContext:
    """Hook units whose parameters are in buckets, so that passes gather and reduce them."""
    options, environment = factory.options, factory.environment
    # A unit without parameters of its own is no unit: nothing to gather, release or prefetch.
    units = [unit for unit in units if unit.buckets]
    buckets = [bucket for unit in (root, *units) for bucket in unit.buckets]
    _warn_of_outside_holders(p for bucket in buckets for p in bucket.parameters)
    of_root = [
        Unit(ROOT, root.module, -1 - number, [bucket], sync=root.sync)
        for number, bucket in enumerate(bucket for bucket in root.buckets if bucket.is_trainable)
    ]
    order = PrefetchOrder(
        len(units),
        nest_units(units),
        given=factory.given,
        records=options.prefetch_order == "recorded",
        agree=_agreement_on_gathers(options, environment),
    )
    kind: Callable[..., Schedule] = Schedule
    if options.enable_fine_grained_param_gather:
        kind = partial(ScheduleByModule, agree=_agreement_on_gathers(options, environment))
    context = ShardedContext(
        root,
        units,
        kind(
            root,
            units,
            order,
            environment.events,
            prefetch=options.overlap_param_gather,
            budget_bytes=options.prefetch_budget_bytes,
            allocators=factory.allocators,
        ),
        Reductions(
            [*units, *reversed(of_root)],
            overlap=options.overlap_grad_reduce,
            guard=factory.guard,
            agreement=OrderAgreement(environment.dense.data_group, environment.streams.device),
            usages=_usages(buckets, environment) if options.tells_use else [],
        ),
        events=environment.events,
        auto_sync=options.sync_model_each_microbatch,
        allocators=factory.allocators,
    )
    attach_hooks(context)
    context.transports = factory.transports()
    if factory.user_buffers is not None:
        context.user_buffers = factory.user_buffers
        if not options.manual_registration:
            factory.user_buffers.register()
        end = weakref.finalize(context, factory.user_buffers.abandon)
        end.atexit = False  # the process group is gone by then
    return context


def _agreement_on_gathers(
    options: Options, environment: Environment
) -> Callable[[Sequence[int]], bool]:
    """Whether the ranks that gather together have seen the same order.

    Without gathers in passes every rank may run the model alone, as for an evaluation.
    """
    strategy, dense = options.strategy, environment.dense
    if not strategy.inner.gathers_every_use:
        return lambda _seen: True
    inner = dense.mesh.get_group(dense.mesh.ndim - 1)
    group = dense.data_group if strategy.outer.shards_optimizer else inner
    return OrderAgreement(group, environment.streams.device).is_same_pass


def _usages(buckets: list[Bucket], environment: Environment) -> list[Usage]:
    """Of the dense parameters and of the experts', where there are any that are trained."""
    usages = []
    for axes in environment.all_axes:
        own = [bucket for bucket in buckets if bucket.axes is axes and bucket.is_trainable]
        parameters = [id(managed.raw) for bucket in own for managed in bucket.parameters]
        if parameters:
            streams, events = environment.streams, environment.events
            usages.append(Usage(axes.data_group, parameters, streams, events))
    return usages


def _user_buffers(options: Options, environment: Environment) -> UserBuffers | None:
    """The pool that everything is allocated in from now on, where one is requested. Collective."""
    if not options.nccl_ub:
        return None
    groups = [
        (axes.role_prefix + role, group)
        for axes in environment.all_axes
        for role, group in axes.named_groups()
    ]
    # Of all groups the outer ones last, on every rank alike.
    groups.sort(key=lambda named: named[0].endswith("outer"))
    return user_buffers(groups, environment.streams, symmetric=options.registers_windows)


def _warn_of_outside_holders(parameters: Iterable[ManagedParameter]) -> None:
    """Of modules in this process that hold a sharded weight and no unit runs.

    Such a module may be a leftover (a traced copy, a list) or part of what is trained.
    """
    members = list(parameters)
    names = {id(member.raw): member.names[0] for member in members}
    inside = {id(holder._parameters) for member in members for holder, _ in member.holders}

    def outside() -> Iterator[tuple[str, str]]:
        for module in [each for each in gc.get_objects() if issubclass(type(each), nn.Module)]:
            # Modules of others may have no dict yet, or answer every attribute themselves.
            held = object.__getattribute__(module, "__dict__").get("_parameters") or {}
            if id(held) not in inside:
                yield from (
                    (names[id(p)], type(module).__name__) for p in held.values() if id(p) in names
                )

    if next(outside(), None):
        gc.collect()  # a model of before may have held them
        for name, kind in islice(outside(), 1):
            warnings.warn(
                f"{name} is also held by a {kind} outside of what was sharded. If that module "
                "runs, it computes with memory that comes and goes: call fully_shard for a module "
                "around both, or give each a parameter of its own.",
                UserWarning,
                stacklevel=4,
            )


def _warn_of_narrow(found: set[GroupDtypes[torch.dtype]]) -> None:
    """Say where main weights hold less than the model does, such as FP32 for a model in FP64."""
    for dtypes in found:
        if is_wider(dtypes.compute, dtypes.main_params):
            warnings.warn(
                f"main weights in {dtypes.main_params} round weights in {dtypes.compute}: pass "
                "MixedPrecisionPolicy(main_params_dtype=None) to keep them as they are, or "
                f"main_params_dtype={dtypes.compute}.",
                RuntimeWarning,
                stacklevel=5,
            )


class BucketFactory:
    """Builds the run-time side of bucket plans; holds what all of them share.

    given: the order of units that the caller has given, None for another one.
    """

    def __init__(
        self,
        options: Options,
        environment: Environment,
        plans: list[BucketPlan],
        members: dict[str, list[ManagedParameter]],
        given: Sequence[int] | None,
    ) -> None:
        self.options, self.environment, self.given = options, environment, given
        self._dense_ranks = environment.dense.coordinate().data_parallel_size
        self.guard = NanGuard(
            environment.dense.mesh.get_rank(),
            each_parameter=options.report_nan_in_param_grad,
            before_reduction=options.check_for_nan_in_grad,
        )
        self._specs = {plan.name: self._spec(plan, members[plan.name]) for plan in plans}
        _warn_of_narrow({spec.dtypes for spec in self._specs.values()})
        self.user_buffers = _user_buffers(options, environment)
        # The root asks once per pass: no slot is planned for it.
        of_units = [spec.buffers for spec in self._specs.values() if spec.plan.unit != ROOT]
        self.allocators = Allocators(
            options.allocation,
            of_units,
            streams=environment.streams,
            ledger=environment.ledger,
        )
        if options.nccl_ub:
            self.allocators.reserve([spec.buffers for spec in self._specs.values()])
        scratch = self.allocators.scratch
        events, streams = environment.events, environment.streams
        self._communicators = {
            axes.role_prefix: axes.communicators(options, scratch, events=events, streams=streams)
            for axes in environment.all_axes
        }

    def transports(self) -> dict[str, str]:
        """What carries the bytes of each group, experts' included; see `AxisCommunicators`."""
        wide = any(spec.dtypes.widens_sums for spec in self._specs.values())
        sums = {"native": "native, sums by point_to_point"} if wide else {}
        return {
            prefix + role: sums.get(entry, entry)
            for prefix, communicators in self._communicators.items()
            for role, entry in communicators.transports().items()
        }

    def _spec(self, plan: BucketPlan, members: list[ManagedParameter]) -> BucketSpec:
        options, axes = self.options, self.environment.axes(is_expert=plan.is_expert)
        stored, policy = members[0].raw.dtype, options.mixed_precision_policy
        compute = options.compute_dtype(stored)
        dtypes = group_dtypes(compute, policy, options, trainable=plan.requires_grad)
        if compute != stored:
            dtypes = replace(dtypes, main_params=stored, main_grads=stored)
        return BucketSpec(
            plan,
            options,
            axes.coordinate(),
            dtypes,
            self._dense_ranks,
            *self._codec(plan, members, axes),
        )

    def _codec(
        self, plan: BucketPlan, members: list[ManagedParameter], axes: DataParallelAxes
    ) -> tuple[tuple[Payload, ...], Callable[[Shard], BucketCodec]]:
        """What gathers of a bucket send, as far as is known, and what makes its codec."""
        layout = plan.layout
        if plan.primary:
            keeps = self.options.keep_fp8_transpose_cache

            def make(shard: Shard) -> BucketCodec:
                # Not before: weights on the meta device have other tensors until then.
                now = [managed.raw for managed in members]
                return PrimaryBucket(now, axes.data_group, shard, keeps_copies=keeps)

            return payloads_of(plan.primary, layout), make
        codec = self.options.mixed_precision_policy.weight_codec if plan.is_encoded else None
        if codec is None:
            return (Payload(WEIGHTS, plan.dtype, layout.slice_elements),), lambda _shard: Plain()
        payloads = codec.payloads(layout, plan.dtype)
        lacking = BOTH.difference(*(payload.directions for payload in payloads))
        if lacking:
            raise ConfigurationError(
                f"{plan.name}: weight_codec={codec!r} has no payload that a "
                f"{' or '.join(sorted(lacking))} pass gathers: expected one for each direction."
            )
        return payloads, codec.for_bucket

    def build(self, plan: BucketPlan, members: list[ManagedParameter]) -> Bucket:
        """The bucket of `plan`, its parameters moved into its buffers."""
        environment, spec = self.environment, self._specs[plan.name]
        axes = environment.axes(is_expert=plan.is_expert)
        shared = spec, self._communicators[axes.role_prefix], self.allocators
        on_move, events = partial(move_parameters, members), environment.events
        weights = WeightBuffers(*shared, on_move=on_move, events=events)
        gradients = None
        if plan.requires_grad:
            gradients = GradientBuffers(
                *shared,
                members,
                guard=self.guard or None,
                events=events,
            )
        bucket = Bucket(spec, members, weights, gradients, axes=axes)
        if plan.is_expert:
            scope = ExpertScope(environment.dense.groups, len(axes.ranks))
            for managed in members:
                mark_expert(managed.sharded, scope)
        return bucket


@dataclass
class _Held:
    """One physical parameter, with every path that leads to it."""

    raw: nn.Parameter
    names: list[str]
    chains: list[tuple[str, ...]]
    holders: dict[tuple[int, str], nn.Module]


def _collect(root: Unit, units: dict[int, str], left_alone: set[int]) -> list[_Held]:
    """Physical parameters in registration order, with the units around each of their names.

    units: id of a unit's module -> its name. left_alone: ids of parameters. A module that is
    registered under several parents is visited once per path, since its parameters may then belong
    to several units.
    """
    collected: dict[int, _Held] = {}

    def visit(module: nn.Module, path: str, around: tuple[str, ...]) -> None:
        if id(module) in units:
            around = (*around, units[id(module)])
        for attribute, parameter in module._parameters.items():
            is_left = parameter is None or id(parameter) in left_alone
            if parameter is None or is_left or offsets_of(parameter) is not None:
                continue
            held = collected.setdefault(id(parameter), _Held(parameter, [], [], {}))
            held.names.append(path + attribute)
            held.chains.append(around)
            held.holders[id(module), attribute] = module
        for attribute, child in module._modules.items():
            if child is not None:
                visit(child, f"{path}{attribute}.", around)

    visit(root.module, "", (root.name,))
    return list(collected.values())


def _unbuilt(
    held: _Held, kind: str, environment: Environment, options: Options
) -> Iterator[Refusal]:
    """A tensor that would be gathered in full, or kept as codes where that cannot be."""
    name, local = held.names[0], getattr(held.raw, "_local_tensor", held.raw)
    gathers = hasattr(local, "fsdp_pre_all_gather") or hasattr(local, "fsdp_post_all_gather")
    yield (
        gathers and not kind,
        CapabilityNotBuiltError,
        f"{name} is a {type(local).__name__}, which wants to be gathered by its own "
        "fsdp_pre_all_gather. That is not built. Shard plain weights (torchao: "
        "enable_fsdp_float8_all_gather=False); for gathers in FP8 pass "
        'MixedPrecisionPolicy(weight_codec=Float8Reference("current")).',
    )
    yield (
        kind and environment.dense.tensor_group is not None,
        CapabilityNotBuiltError,
        f"{name} is kept as codes by Transformer Engine. That is not built with tp_dim: make the "
        "model outside of quantized_model_init().",
    )
    yield (
        kind and options.offload,
        CapabilityNotBuiltError,
        f"{name} is kept as codes by Transformer Engine, made from main weights on the device, and "
        "offload=True keeps those in host memory. Leave offload out, or make the model outside of "
        "quantized_model_init().",
    )
    yield (
        kind and options.mixed_precision_policy.main_params_dtype is None,
        ConfigurationError,
        f"{name} is kept as codes by Transformer Engine, and main_params_dtype=None leaves no "
        "weights for the optimizer. Use MixedPrecisionPolicy(main_params_dtype=torch.float32).",
    )


def _manage(
    held: _Held,
    environment: Environment,
    options: Options,
    readers: Mapping[int, tuple[int, ...]],
) -> tuple[ManagedParameter, ParameterFacts]:
    """readers: as of `readers_of`, empty where units gather as a whole."""
    raw, names = held.raw, tuple(held.names)
    primary = next((k for m in held.holders.values() if (k := primary_kind(m, raw))), "")
    if primary:
        check_primary(names[0], raw, primary)
    refuse(_unbuilt(held, primary, environment, options))
    expert = is_expert(names, raw, has_expert_mesh=environment.experts is not None)
    part = tensor_part(names[0], raw, environment.axes(is_expert=expert).tensor_group)
    holders = tuple((holder, attribute) for (_, attribute), holder in held.holders.items())
    of_holders = (readers.get(id(holder), ()) for holder, _ in holders)
    facts = ParameterFacts(
        names,
        nearest_common_unit(held.chains),
        part.shape,
        dtype_name(raw.dtype),
        raw.requires_grad,
        expert,
        primary,
        tuple(sorted({number for numbers in of_holders for number in numbers})),
    )
    return ManagedParameter(names, holders, raw, part), facts
