"""FSDP2's interface over the core: `fully_shard` of torch 2.13, in place and without a wrapper.

[Note: when what is built] A call moves the module's own parameters, those that no call on a module
inside has taken, into buckets of one unit: they are DTensors when it returns, and an optimizer may
be built. The first pass through the outermost module that was sharded, or whatever needs gathered
weights before, makes all units in it one model, with its order and its hooks. Parameters on the
meta device are sharded there, and get memory by `to_empty()`.

Nothing is known of the optimizer: weights that have changed are seen when the next pass begins, and
gradients that were removed begin a new cycle then.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Self
from weakref import ReferenceType, WeakKeyDictionary, WeakValueDictionary, ref

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.utils import _apply_to_tensors

from mfsdp_core.comm.torch_backend import Communicator
from mfsdp_core.errors import (
    CapabilityNotBuiltError,
    ConfigurationError,
    LifecycleError,
    Refusal,
    refuse,
    refuse_configuration,
)
from mfsdp_core.events import EventBus
from mfsdp_core.memory.ledger import MemoryLedger
from mfsdp_core.plan.options import Options
from mfsdp_core.plan.prefetch import Direction
from mfsdp_core.precision.policy import MixedPrecisionPolicy as CorePolicy
from mfsdp_core.runtime.build import BucketFactory, Environment, run_units, shard_units
from mfsdp_core.runtime.context import ShardedContext
from mfsdp_core.runtime.gathering import refuse_ungathered
from mfsdp_core.runtime.parameters import ManagedParameter
from mfsdp_core.runtime.units import Unit, is_called
from mfsdp_core.shard.chunk import offsets_of
from mfsdp_core.shard.dtensor import name_tensor
from mfsdp_core.sharding import (
    environment_of,
    prepare_tensors,
    refuse_devices_alone,
    refuse_shared,
)
from mfsdp_core.state.model_state import load_model_state, serve_holders, shard_of
from mfsdp_core.streams import Streams

__all__ = [
    "CPUOffloadPolicy",
    "FSDPModule",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "UnshardHandle",
    "fully_shard",
    "register_fsdp_forward_method",
]

#: Attribute of a module: its `_Sharded`.
_STATE = "_mfsdp_sharded"
_META = torch.device("meta")
#: Dimensions of a mesh, and whether they have no names.
_MESHES = {(1, False), (1, True), (2, False)}
_ON_META = (
    "{what} has parameters on the meta device: expected model.to_empty(device=...) and values for "
    "all of them, or load_state_dict(..., assign=True), before anything reads them."
)
Rows = Iterable[Refusal]


def fully_shard(
    module: Any,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: Callable[[nn.Parameter], Any] | None = None,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),  # noqa: B008 - frozen
    offload_policy: OffloadPolicy | None = None,
    ignored_params: set[nn.Parameter] | None = None,
    **unknown: Any,
) -> Any:
    """Shard the parameters of `module` that no call on a module inside has taken. Collective.

    Returns `module`, whose class is an `FSDPModule` as well now. Modules of a list are units of
    their own; a parameter that several of them hold is left to the call on a module around.

    mesh: of one dimension, or of two named ones, of which the first replicates; None: all ranks.
    reshard_after_forward: whether weights go after the forward pass; None: yes, but of the
    outermost module; a number: but for a part, from which so many neighbours put them together
    for the backward pass. shard_placement_fn: may say None or Shard(0). mp_policy: torch's; sums
    over ranks are held in the dtype that travels. offload_policy: torch's CPUOffloadPolicy() is
    `offload` of `Options`. ignored_params: stay as they are.

    Raises:
        ConfigurationError: an argument that cannot mean anything. Nothing has been sharded.
        CapabilityNotBuiltError: one whose capability is not built.
        LifecycleError: a module inside has run already.
    """
    refuse_configuration(
        _wrong_options(mesh, reshard_after_forward, mp_policy, offload_policy, unknown)
    )
    modules = module if isinstance(module, list) else [module]
    ignored = set(ignored_params or ())
    refuse_configuration(_wrong_modules(modules, ignored))
    for each in modules:
        refuse_shared(each)
        refuse(_wrong_parameters(_own(each, ignored), mp_policy, shard_placement_fn))
    held = Counter(parameter for each in modules for parameter in each.parameters())
    alone = ignored | {parameter for parameter, times in held.items() if times > 1}
    options, place = _place(mesh, mp_policy, offload=isinstance(offload_policy, CPUOffloadPolicy))
    refuse_devices_alone(options, place.environment)
    refuse(_unpinned(offload_policy, place.environment.streams.device))
    refuse(row for m in modules for inner in _inside(m) for row in _wrong_inside(inner, place))
    for each in modules:
        unit = Unit(f"{next(place.numbers)} {type(each).__name__}", each, index=None)
        unit.stays = {"forward"} if reshard_after_forward is False else set()
        state = _Sharded(unit, place, options, alone, ignored, reshard_after_forward is None)
        if not isinstance(reshard_after_forward, bool | None):
            state.partners = place.partners_of(reshard_after_forward)
        state.shard(meta=any(p.is_meta for p in _own(each, alone).values()))
        for inner in _inside(each):
            inner.around = inner.around or ref(each)
        setattr(each, _STATE, state)
        _cast_around(each, mp_policy)
        each.__class__ = _class_of(type(each))  # type: ignore[arg-type]
    return module


class UnshardHandle:
    """Of a gather that `unshard(async_op=True)` has started."""

    def __init__(self, context: ShardedContext, unit: Unit) -> None:
        self._context, self._unit = context, unit

    @torch.no_grad()
    def wait(self) -> None:
        """Return once the whole weights are there; the modules see them."""
        self._context.schedule.issue(self._unit, "forward")
        self._context.schedule.wait([self._unit])
        self._unit.show_raw()


class FSDPModule(nn.Module):
    """What `fully_shard` makes of a module: torch's methods of that name, with their meaning."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """A module of the class before sharding, as for a slice of a `Sequential`."""
        return cls.__mro__[2](*args, **kwargs)

    def __deepcopy__(self, _memo: dict[int, Any]) -> Self:
        """Refuse, with a LifecycleError."""
        raise LifecycleError("a sharded module cannot be copied: copy its state_dict() instead.")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module; the first call of all builds what it needs."""
        context = _context(self)
        if context.root.module is not self:
            return super().__call__(*args, **kwargs)
        context.grads.follow_removed()
        try:
            return super().__call__(*args, **kwargs)
        except BaseException as error:
            context.recover()
            refuse_ungathered(error)
            raise

    @torch.no_grad()
    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gather the module's own weights, which stay whole until `reshard` or its next pass."""
        context, unit = _context(self), _state(self).unit
        context.schedule.follow_changes([unit])
        context.schedule.issue(unit, "forward")
        handle = UnshardHandle(context, unit)
        return handle if async_op else handle.wait()

    def reshard(self) -> None:
        """Free the module's own whole weights, unless it is running."""
        context, unit = _state(self).context, _state(self).unit
        if context is not None and not (unit.open or unit.active_backwards):
            context.schedule.release(unit)
            unit.show_sharded()

    def set_requires_gradient_sync(
        self, requires_gradient_sync: bool, *, recurse: bool = True
    ) -> None:
        """Whether backward passes reduce gradients, rather than add them up whole on each rank."""
        for state in _inside(self, recurse=recurse):
            state.unit.sync.axes = "both" if requires_gradient_sync else "none"
            state.follow_flags()

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Whether gradients are reduced along the first dimension of the mesh as well."""
        for state in _inside(self, recurse=recurse):
            if state.unit.sync.axes != "none":
                state.unit.sync.axes = "both" if requires_all_reduce else "inner"

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Whether the next backward passes show their gradients at their end."""
        _state(self).is_last = is_last_backward
        _state(self).follow_flags()

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Whether whole weights go after the forward pass."""
        for state in _inside(self, recurse=recurse):
            state.is_auto = False
            state.let_stay("forward", goes=reshard_after_forward)

    def set_reshard_after_backward(
        self, reshard_after_backward: bool, *, recurse: bool = True
    ) -> None:
        """Whether whole weights go after the backward pass."""
        for state in _inside(self, recurse=recurse):
            state.let_stay("backward", goes=reshard_after_backward)

    def set_modules_to_forward_prefetch(self, modules: list[FSDPModule]) -> None:
        """The modules whose weights are gathered ahead when this one runs forward."""
        _state(self).unit.followers["forward"] = [_state(each).unit for each in modules]

    def set_modules_to_backward_prefetch(self, modules: list[FSDPModule]) -> None:
        """The modules whose weights are gathered ahead when this one runs backward."""
        _state(self).unit.followers["backward"] = [_state(each).unit for each in modules]

    def set_gradient_divide_factor(self, factor: float) -> None:
        """What sums over ranks of the module's own gradients are divided by."""
        for buffers in _state(self).unit.gradients:
            buffers.divide_by(factor)

    def reset_iter_state(self) -> None:
        """Forget what a pass that has raised left behind, and the gradients of its cycle."""
        _context(self).begin_cycle()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As of any module; with the outermost one a new cycle begins."""
        super().zero_grad(set_to_none=set_to_none)
        context = _state(self).context
        if context is not None and context.root.module is self:
            context.begin_cycle(keeps_zeros=not set_to_none)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """The shards, also while whole weights are there."""
        for name, parameter in super().named_parameters(*args, **kwargs):
            yield name, shard_of(parameter)

    @torch.no_grad()
    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load whole tensors, shards of this sharding, or what torch has cut over one dimension.

        Values are copied, with `assign` too: that gives memory to parameters on the meta device.

        Raises:
            StateDictError: what does not fit; nothing has been loaded.
            ConfigurationError: parameters on the meta device, without `assign`.
        """
        states = list(_inside(self))
        wrong = _ON_META.format(what=type(self).__name__)
        refuse_configuration((state.is_meta and not assign, wrong) for state in states)
        for state in states:
            state.materialise()
        _name_parameters(self)
        buckets = [bucket for state in states for bucket in state.unit.buckets]
        result = load_model_state(
            self, buckets, state_dict, strict=strict, prefix="", assign=assign
        )
        for state in states:
            state.unit.epoch += 1
            for bucket in state.unit.buckets:
                bucket.weights.install(anew=True)
        return result

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        """Give memory to parameters on the meta device, where `fn` moves those elsewhere."""
        if _state(self).is_meta and fn(torch.empty(0, device=_META)).device != _META:
            _state(self).materialise()
            return self._apply(fn, recurse)  # of the instance, if that is guarded now
        return super()._apply(fn, recurse)  # type: ignore[no-any-return]


def environment_of_module(module: nn.Module) -> Environment:
    """Where a sharded module is, with its `events` and the `ledger` of what is held there.

    Raises:
        ConfigurationError: the module is not sharded.
    """
    return _state(module).place.environment


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Let one more method of `module` run as `forward` does, with all hooks.

    Does nothing for a module that is not sharded.

    Raises:
        ConfigurationError: the module has no such method.
    """
    method = getattr(module, method_name, None)
    what = f"{type(module).__name__} has no method {method_name!r}."
    refuse_configuration([(method is None, what)])
    if not isinstance(module, FSDPModule) or method is None:
        return
    own = vars(module)

    @functools.wraps(method)
    def run(*args: Any, **kwargs: Any) -> Any:
        kept = {name: own[name] for name in ("forward",) if name in own}

        def once(*args: Any, **kwargs: Any) -> Any:
            del own["forward"]
            own.update(kept)
            return method(*args, **kwargs)

        own["forward"] = once
        return module(*args, **kwargs)

    setattr(module, method_name, run)


@dataclass(frozen=True)
class _Options(Options):
    """Whose gradients are added to by further passes.

    param_dtype: in which modules compute; None: in that of their parameters.
    """

    reopens = True
    param_dtype: torch.dtype | None = field(default=None, kw_only=True)

    def compute_dtype(self, stored: torch.dtype) -> torch.dtype:
        """As `param_dtype` says, of floating-point parameters."""
        return self.param_dtype or stored if stored.is_floating_point else stored


class _Place:
    """What units on one mesh share.

    numbers, of calls, and neighbours, meshes by how many ranks along the dimension that shards they
    have: as long as the world is there, so that ranks count and make them alike, whatever garbage
    one of them has collected.
    """

    def __init__(
        self, environment: Environment, numbers: Iterator[int], neighbours: dict[int, DeviceMesh]
    ) -> None:
        self.environment = environment
        self.numbers = numbers
        self._neighbours = neighbours

    def partners_of(self, ranks: int) -> Communicator:
        """So many neighbours along the dimension that shards, this rank among them. Collective."""
        mesh = self.environment.dense.mesh
        if ranks not in self._neighbours:
            parts = DeviceMesh(mesh.device_type, mesh.mesh.reshape(-1, ranks))
            self._neighbours[ranks] = parts
        group = self._neighbours[ranks].get_group(1)
        return Communicator(group, "inner", self.environment.events, self.environment.streams)


@dataclass(eq=False)
class _Sharded:
    """What a call of `fully_shard` knows of one module.

    left_alone: parameters that the call did not take: `ignored` by the caller, or left to a call
    around. is_auto: weights stay after the forward pass if the module is the outermost. around: the
    module of the next call outside. partners: who puts weights together for a backward pass, if not
    all. context: of the model, once it is built.
    """

    unit: Unit
    place: _Place
    options: Options
    left_alone: set[nn.Parameter]
    ignored: set[nn.Parameter]
    is_auto: bool
    is_last: bool = True
    is_meta: bool = False
    around: ReferenceType[nn.Module] | None = None
    partners: Communicator | None = None
    context: ShardedContext | None = None
    factory: BucketFactory = field(init=False)

    @property
    def parameters(self) -> list[ManagedParameter]:
        """Of all buckets."""
        return [managed for bucket in self.unit.buckets for managed in bucket.parameters]

    def shard(self, *, meta: bool) -> None:
        """Move the module's own parameters into buckets; meta: on the meta device."""
        module, environment = self.unit.module, self.place.environment
        if meta:
            apart = Streams(_META), EventBus(), MemoryLedger()
            environment = Environment(environment.dense, environment.experts, *apart)
        else:
            for parameter in _own(module, self.left_alone).values():
                parameter.grad = None  # of before: an optimizer of before is none of the shards'
            prepare_tensors(module, environment.streams.device, self.left_alone)
        self.factory = shard_units(
            self.unit,
            [],
            self.options,
            environment,
            left_alone=self.left_alone,
            initialises=False,
        )
        for managed in self.parameters:
            vars(managed.raw)["__fsdp_param__"] = True
        serve_holders(self.parameters, moves=meta)
        self.is_meta = meta

    def materialise(self) -> None:
        """Give memory, of zeros, to what is on the meta device; parameters stay objects."""
        if not self.is_meta:
            return
        device = self.place.environment.streams.device
        faces = {managed.holders[0]: managed.sharded for managed in self.parameters}
        for managed in self.parameters:
            raw, like = managed.raw, managed.sharded
            blank = torch.zeros(raw.shape, dtype=like.dtype, device=device)
            managed.raw = nn.Parameter(blank, raw.requires_grad)
            vars(managed.raw).update(vars(raw))
            managed.show_raw()
        self.unit.forget_buckets()
        self.shard(meta=False)
        for managed in self.parameters:
            face = faces[managed.holders[0]]
            torch.utils.swap_tensors(face, managed.sharded)
            managed.sharded = face
            managed.watch()
        serve_holders(self.parameters)
        self.unit.show_sharded()

    def let_stay(self, direction: Direction, *, goes: object) -> None:
        """Whether weights go after passes in one direction."""
        what = f"reshard_after_{direction}={goes!r}: expected True or False."
        refuse_configuration([(not isinstance(goes, bool), what)])
        if direction == "forward":
            self.partners = None
            self.keep_part()
        (self.unit.stays.discard if goes else self.unit.stays.add)(direction)

    def keep_part(self) -> None:
        """Let weights leave a part behind, or none."""
        for bucket in self.unit.buckets:
            bucket.weights.keep_part(self.partners)

    def follow_flags(self) -> None:
        """Tell the model whether its backward passes end a cycle."""
        if self.context is not None:
            units = (self.context.root, *self.context.units)
            is_last = _state(self.context.root.module).is_last
            self.context.auto_sync = is_last and any(unit.sync.axes != "none" for unit in units)


def _state(module: nn.Module) -> _Sharded:
    what = f"expected an FSDPModule, found {type(module).__name__}."
    refuse_configuration([(not isinstance(module, FSDPModule), what)])
    state: _Sharded = getattr(module, _STATE)
    return state


def _inside(module: nn.Module, *, recurse: bool = True) -> Iterator[_Sharded]:
    """Of the module, if it is sharded, and of those inside."""
    modules = module.modules() if recurse else (module,)
    return (_state(each) for each in modules if isinstance(each, FSDPModule))


def _own(module: nn.Module, left_alone: set[nn.Parameter]) -> dict[str, nn.Parameter]:
    """Parameters that a call on the module shards."""
    named = module.named_parameters()
    return {n: p for n, p in named if p not in left_alone and offsets_of(p) is None}


def _name_parameters(root: nn.Module) -> None:
    """Call parameters what they are called in `root`."""
    paths: dict[nn.Module, list[str]] = {}
    for path, module in root.named_modules(remove_duplicate=False):
        paths.setdefault(module, []).append(f"{path}." if path else "")
    for managed in (managed for state in _inside(root) for managed in state.parameters):
        names = [path + name for holder, name in managed.holders for path in paths[holder]]
        managed.names = tuple(names)
        name_tensor(managed.sharded, names[0])


def _context(module: nn.Module) -> ShardedContext:
    """The model that `module` is of; built now, if nothing has needed it yet.

    Raises:
        ConfigurationError: it has parameters on the meta device.
    """
    root = _state(module)
    if root.context is not None:
        return root.context
    while root.around is not None and (outer := root.around()) is not None:
        root = _state(outer)
    top = root.unit.module
    named = {
        name: _state(each) for name, each in top.named_modules() if isinstance(each, FSDPModule)
    }
    _name_parameters(top)
    refuse_configuration(_wrong_model(named))
    for name, state in named.items():
        state.unit.name = name
    if root.is_auto:
        root.unit.stays.add("forward")
    units = [state.unit for state in named.values() if state is not root]
    context = run_units(root.unit, units, root.factory)
    for state in named.values():
        state.context = context
        state.keep_part()
    root.follow_flags()
    return context


@functools.cache
def _class_of(kind: Any) -> Any:
    """`kind`, and an `FSDPModule`."""
    return type(f"FSDP{kind.__name__}", (FSDPModule, kind), {"__module__": kind.__module__})


def _cast_around(module: nn.Module, policy: MixedPrecisionPolicy) -> None:
    """Cast what the module is given, and what it returns, as the policy says."""

    def cast(dtype: torch.dtype, values: Any) -> Any:
        return _apply_to_tensors(lambda x: x.to(dtype) if x.is_floating_point() else x, values)

    given, made = policy.param_dtype, policy.output_dtype
    if given is not None and policy.cast_forward_inputs:
        module.register_forward_pre_hook(
            lambda _module, args, kwargs: (cast(given, args), cast(given, kwargs)),
            with_kwargs=True,
            prepend=True,
        )
    if made is not None:
        module.register_forward_hook(lambda _module, _args, output: cast(made, output))


#: By mesh (None: all ranks) and the world, as long as something is sharded there.
_places: WeakValueDictionary[tuple[object, int], _Place] = WeakValueDictionary()
#: What a `_Place` of each mesh counts and makes, as long as the world is there.
_agreed: WeakKeyDictionary[dist.ProcessGroup, dict[DeviceMesh | None, tuple[Any, Any]]]
_agreed = WeakKeyDictionary()


def _place(
    mesh: DeviceMesh | None, policy: MixedPrecisionPolicy, *, offload: bool
) -> tuple[Options, _Place]:
    """The options of one call, and where it is sharded."""
    wire, compute = policy.reduce_dtype, policy.param_dtype
    core = CorePolicy(None, None, wire, reduce_dtype=wire)
    options = _Options(mesh, mixed_precision_policy=core, offload=offload, param_dtype=compute)
    if mesh is not None and mesh.mesh_dim_names is not None and mesh.ndim > 1:
        outer, inner = mesh.mesh_dim_names
        options = replace(options, dp_outer_dim=outer, dp_shard_dim=inner)
    world: Any = dist.group.WORLD
    key = mesh, id(world)
    place = _places.get(key)
    if place is None:
        group = mesh._flatten().get_group() if mesh is not None and mesh.ndim > 1 else None
        environment = environment_of(replace(options, hybrid_fsdp_group=group))
        agreed = _agreed.setdefault(world, {}).setdefault(mesh, (itertools.count(), {}))
        place = _places[key] = _Place(environment, *agreed)
    return options, place


def _other_kind(name: str, value: object, kinds: Any, expected: str) -> tuple[object, str]:
    what = f"{name}: expected {expected}, found {type(value).__name__}."
    return not isinstance(value, kinds), what


def _wrong_options(
    mesh: DeviceMesh | None, reshard: object, policy: object, offload: object, unknown: Any
) -> Iterator[tuple[object, str]]:
    yield _other_kind("mesh", mesh, (DeviceMesh, type(None)), "a DeviceMesh or None")
    yield unknown, f"fully_shard does not know {', '.join(unknown)}: leave it out."
    yield (
        mesh is not None and (mesh.ndim, mesh.mesh_dim_names is None) not in _MESHES,
        f"mesh: expected one dimension, or two with names; found {mesh}. The first of two "
        "replicates and the second shards: pass a part, as mesh['replicate', 'shard'].",
    )
    everyone = dist.get_world_size() if dist.is_initialized() else 1
    ranks = everyone if mesh is None else mesh.size(mesh.ndim - 1)
    divisors = [size for size in range(2, ranks) if ranks % size == 0]
    numbers = f"None, or one of {divisors} of the {ranks} ranks that shard"
    if not divisors:
        numbers = f"None: no number between divides the {ranks} ranks that shard"
    is_number = type(reshard) is int and reshard in divisors
    yield (
        not (is_number or isinstance(reshard, bool | None)),
        f"reshard_after_forward={reshard!r}: expected True, False or {numbers}.",
    )
    torchs = "torch.distributed.fsdp.MixedPrecisionPolicy"
    yield _other_kind("mp_policy", policy, MixedPrecisionPolicy, torchs)
    for name in ("param_dtype", "reduce_dtype", "output_dtype"):
        dtype = getattr(policy, name, None)
        where = f"mp_policy: {name}"
        yield _other_kind(where, dtype, (torch.dtype, type(None)), "a torch.dtype")
    kinds = (OffloadPolicy, type(None))
    yield _other_kind("offload_policy", offload, kinds, "CPUOffloadPolicy() or None")


def _unpinned(offload: OffloadPolicy | None, device: torch.device) -> Rows:
    yield (
        not getattr(offload, "pin_memory", True) and device.type == "cuda",
        CapabilityNotBuiltError,
        "offload_policy: pin_memory=False is not built for CUDA, copies would hold up the host: "
        "leave it out.",
    )


def _wrong_modules(modules: list[Any], left_alone: set[Any]) -> Iterator[tuple[object, str]]:
    inside = [inner for m in modules if isinstance(m, nn.Module) for inner in m.modules()]
    yield (
        any(inside.count(module) > 1 for module in modules),
        "a module of the list is in another one of it, or stands in it twice. Call fully_shard for "
        "the inner one first, then for the one around.",
    )
    for parameter in left_alone:
        expected = "parameters, as in set(module.head.parameters())"
        yield _other_kind("ignored_params", parameter, nn.Parameter, expected)
    for module in modules:
        kind = type(module).__name__
        yield (
            not isinstance(module, nn.Module) or not is_called(module),
            f"fully_shard of a {kind}: expected a module with a forward(), or a list of such. Of a "
            "container, shard what it holds.",
        )
        yield isinstance(module, FSDPModule), f"this {kind} is sharded already."


def _wrong_parameters(
    own: dict[str, nn.Parameter], policy: MixedPrecisionPolicy, placement: Any
) -> Rows:
    for name, parameter in own.items():
        where = None if placement is None else placement(parameter)
        yield (
            where not in (None, Shard(0)),
            CapabilityNotBuiltError,
            f"shard_placement_fn says {where} for {name}: only Shard(0) is built, or None.",
        )
        yield (
            isinstance(parameter, DTensor),
            CapabilityNotBuiltError,
            f"{name} is a DTensor. Tensor parallelism is not built under this fully_shard: use "
            "mfsdp_core.fully_shard_model(tp_dim=...).",
        )
    yield (
        len({parameter.is_meta for parameter in own.values()}) > 1,
        ConfigurationError,
        f"{next(iter(own), '')} and others are on several devices, one of them meta: expected one.",
    )
    dtypes = {str(p.dtype) for p in own.values() if p.is_floating_point() and p.requires_grad}
    yield (
        policy != MixedPrecisionPolicy() and len(dtypes) > 1,
        ConfigurationError,
        f"mp_policy for parameters of {len(dtypes)} dtypes, {', '.join(sorted(dtypes))}: expected "
        "one. Cast them, or shard them apart.",
    )


def _wrong_inside(inner: _Sharded, place: _Place) -> Rows:
    name = type(inner.unit.module).__name__
    yield (
        inner.context is not None,
        LifecycleError,
        f"fully_shard of a module around a {name} that has run already. Shard from the inside out, "
        "and run the outermost module.",
    )
    yield (
        inner.place is not place,
        CapabilityNotBuiltError,
        f"a {name} inside is sharded over another mesh. Units of one model on several meshes are "
        "not built: pass the same mesh.",
    )


def _wrong_model(states: dict[str, _Sharded]) -> Iterator[tuple[object, str]]:
    """Before the first pass: weights without memory, and those that no unit takes care of."""
    ignored = set[nn.Parameter]().union(*(state.ignored for state in states.values()))
    for name, state in states.items():
        what = _ON_META.format(what=name or "the model")
        yield state.is_meta, what
        ties = state.left_alone - ignored
        for path, parameter in state.unit.module.named_parameters():
            yield (
                parameter in ties and offsets_of(parameter) is None,
                f"{path} of the {type(state.unit.module).__name__} is held by several modules of a "
                "list that fully_shard was given, and by no module around that it was called for: "
                "nobody would average its gradients over ranks. Call fully_shard for the module "
                "around them as well, or pass it in ignored_params.",
            )
