"""Weights of a model that was built on the meta device: made, initialised and sharded by unit.

[Note: order of initialisation] Modules are reset in the order in which constructors finish:
children before their parent, siblings in registration order. A model whose parameters are drawn by
its modules' constructors therefore gets, under the same seed, device and dtype, the weights that it
would have had without the meta device. A tied parameter keeps what its first owner drew; its other
owners draw into scratch memory, as they did before they were tied.

At any time there are the root's whole parameters, one unit's, and the shards of finished units.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from mfsdp_core.errors import CapabilityNotBuiltError, ConfigurationError, refuse
from mfsdp_core.plan.grouping import BucketPlan
from mfsdp_core.runtime.parameters import ManagedParameter

_RESETS = ("reset_parameters", "_reset_parameters")
_NAMES_SHOWN = 8


def move_real_tensors(
    module: nn.Module, device: torch.device, left_alone: Collection[nn.Parameter] = ()
) -> None:
    """`module.to(device)` that leaves where it is what is on the meta device, or left alone."""
    kept = {id(parameter) for parameter in left_alone}
    tensors = (*module.parameters(), *module.buffers())
    if all(t.is_meta or t.device == device or id(t) in kept for t in tensors):
        return  # some kinds of tensors lose their attributes on the way
    module._apply(lambda t: t if t.is_meta or id(t) in kept else t.to(device))


def check_meta_tensors(module: nn.Module, *, allowed: bool, sharded: bool) -> None:
    """Refuse a model that cannot be materialised, before anything is changed.

    allowed: `init_model_with_meta_device`. sharded: whether the strategy shards weights' owners.

    Raises:
        ConfigurationError: meta tensors without the argument, under a strategy that shards nothing,
            or in modules that cannot initialise themselves.
    """
    owners = {name: child for name, child in module.named_modules() if _own_meta(child)}
    helpless = [
        f"{name or '(root)'} ({type(child).__name__})"
        for name, child in owners.items()
        if _reset_of(child) is None
    ]
    is_cut = any(isinstance(p, DTensor) and p.is_meta for p in module.parameters())
    rows = (
        (
            not allowed,
            ConfigurationError,
            f"{_listed(owners)} have tensors on the meta device. Pass "
            "init_model_with_meta_device=True, or materialise the model before sharding it.",
        ),
        (
            not sharded,
            ConfigurationError,
            "init_model_with_meta_device=True saves nothing under no_shard, which holds the whole "
            "model on every rank, and is refused. Use zero_dp_strategy 1 to 3, or initialise the "
            "model on its device.",
        ),
        (
            is_cut,
            CapabilityNotBuiltError,
            "init_model_with_meta_device=True of tensor-parallel parameters is not built: every "
            "rank of tp_dim would have to draw its own part. Materialise the model first.",
        ),
        (
            helpless,
            ConfigurationError,
            "init_model_with_meta_device=True calls reset_parameters() or _reset_parameters() of "
            f"every module that owns tensors on the meta device; {_listed(helpless)} have neither. "
            "Define it there, to set the module's own parameters and buffers.",
        ),
    )
    refuse(rows if owners else ())


class MetaInitialiser:
    """Materialises the modules of one model one after another.

    parameters: all of the model's; their `raw` becomes real. device: where.
    """

    def __init__(
        self, root: nn.Module, parameters: Sequence[ManagedParameter], device: torch.device
    ) -> None:
        self._root = root
        self._device = device
        self._parameters = parameters
        self._finished: list[tuple[ManagedParameter, int]] = []
        self._managed = {
            (id(holder), attribute): managed
            for managed in parameters
            for holder, attribute in managed.holders
        }
        self._owned = {id(m): _own_meta(m) for m in root.modules() if _own_meta(m)}
        self._initialised: set[int] = set()
        self._buffers: dict[int, torch.Tensor] = {}

    def ready_plans(
        self, plans: Iterable[BucketPlan], units: Mapping[int, str]
    ) -> Iterator[BucketPlan]:
        """`plans`, each when all of its parameters hold values; those of the root come last.

        units: id of a unit's module -> its name. The caller shards what it is given before it asks
        for more.

        Raises:
            ConfigurationError: a module's reset replaced a parameter by another kind, or set one
                that had been sharded.
        """
        by_unit: dict[str, list[BucketPlan]] = {}
        for plan in plans:
            by_unit.setdefault(plan.unit, []).append(plan)
        for module in _children_first(self._root, set()):
            self._materialise(module)
            if id(module) in units:
                yield from self._handed_out(by_unit.pop(units[id(module)], []))
        for rest in by_unit.values():
            yield from self._handed_out(rest)
        self._check_untouched()
        if self._owned:
            _refuse_unset(dict(self._root.named_buffers()))

    def _handed_out(self, plans: list[BucketPlan]) -> Iterator[BucketPlan]:
        for plan in plans:
            if self._owned:
                members = (self._parameters[index] for index in plan.members)
                _refuse_unset({managed.names[0]: managed.raw for managed in members})
            yield plan
            for index in plan.members if self._owned else ():
                managed = self._parameters[index]
                managed.show_sharded()
                self._finished.append((managed, _version(managed)))

    def _check_untouched(self) -> None:
        touched = [
            managed.names[0] for managed, seen in self._finished if _version(managed) != seen
        ]
        if touched:
            raise ConfigurationError(
                f"{_listed(touched)} were set by reset_parameters() of a module above their unit, "
                "after they had been sharded. It may only set parameters of its own, or of modules "
                "in the same unit."
            )

    @torch.no_grad()
    def _materialise(self, module: nn.Module) -> None:
        owned = self._owned.get(id(module), [])
        for attribute in owned:
            managed = self._managed.get((id(module), attribute))
            if managed is None:
                self._replace_buffer(module, attribute)
                continue
            real = _real_parameter(managed.raw, self._device)
            if id(managed) in self._initialised:
                module._parameters[attribute] = real  # its first owner's draw stays
            else:
                managed.raw = real
                managed.show_raw()
        reset = _reset_of(module)
        if owned and reset is not None:
            reset()
        for attribute in owned:
            managed = self._managed.get((id(module), attribute))
            if managed is not None:
                self._keep(module, attribute, managed)

    def _keep(self, module: nn.Module, attribute: str, managed: ManagedParameter) -> None:
        found = module._parameters.get(attribute)
        if id(managed) not in self._initialised:
            kind = managed.raw.shape, managed.raw.dtype
            if found is None or (found.shape, found.dtype) != kind:
                raise ConfigurationError(
                    f"reset_parameters() of {type(module).__name__} replaced {managed.names[0]} by "
                    "another shape or dtype. It may only set values."
                )
            managed.raw = found
            self._initialised.add(id(managed))
        managed.show_raw()

    def _replace_buffer(self, module: nn.Module, attribute: str) -> None:
        buffer = module._buffers[attribute]
        if buffer is not None and buffer.is_meta:
            real = _unset(torch.empty_like(buffer, device=self._device))
            module._buffers[attribute] = self._buffers.setdefault(id(buffer), real)


def _children_first(module: nn.Module, seen: set[int]) -> Iterator[nn.Module]:
    if id(module) in seen:
        return
    seen.add(id(module))
    for child in module.children():
        yield from _children_first(child, seen)
    yield module


def _own_meta(module: nn.Module) -> list[str]:
    """Names of the module's own parameters and buffers that are on the meta device."""
    own = {**module._parameters, **module._buffers}
    return [name for name, tensor in own.items() if tensor is not None and tensor.is_meta]


def _reset_of(module: nn.Module) -> Callable[[], Any] | None:
    resets = (getattr(module, name, None) for name in _RESETS)
    return next(filter(callable, resets), None)


def _real_parameter(meta: nn.Parameter, device: torch.device) -> nn.Parameter:
    """A parameter without values, with the options and attributes of `meta`."""
    empty = _unset(torch.empty_like(meta, device=device))
    real = nn.Parameter(empty, requires_grad=meta.requires_grad)
    vars(real).update({name: v for name, v in vars(meta).items() if name not in vars(real)})
    return real


def _unset(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor`, filled with what no reset leaves there, where its dtype has such a value."""
    value = _no_value(tensor)
    return tensor if value is None else tensor.fill_(value)


def _no_value(tensor: torch.Tensor) -> float | int | None:
    if type(tensor) not in {torch.Tensor, nn.Parameter}:
        return None
    if tensor.is_floating_point():
        return math.nan if tensor.dtype.itemsize > 1 else None
    is_signed = not tensor.is_complex() and tensor.dtype.is_signed and not tensor.is_quantized
    return torch.iinfo(tensor.dtype).min if is_signed else None


def _refuse_unset(tensors: Mapping[str, torch.Tensor]) -> None:
    """Raise for tensors that are as `_unset` has left them."""
    names = []
    for name, tensor in tensors.items():
        value = None if tensor.is_meta or not tensor.numel() else _no_value(tensor)
        if value is not None:
            data = tensor.detach()
            is_unset = data.isnan() if tensor.is_floating_point() else data == value
            if is_unset.all():
                names.append(name)
    if names:
        raise ConfigurationError(
            f"{_listed(names)} have no values: init_model_with_meta_device=True calls "
            "reset_parameters() of every module, and none of them sets these. Set all of a "
            "module's own parameters and buffers there, or build the model on its device."
        )


def _version(managed: ManagedParameter) -> int:
    """Changes whenever a module writes to the shard."""
    return int(managed.sharded._version)


def _listed(names: Iterable[str]) -> str:
    shown = sorted(name or "(root)" for name in names)
    return ", ".join(shown[:_NAMES_SHOWN]) + (
        f" and {len(shown) - _NAMES_SHOWN} more" if len(shown) > _NAMES_SHOWN else ""
    )
