"""What users and frameworks try on a sharded model besides training, and what happens then.

Moves, casts, pickling, DDP around the wrapper, and parameters that are added later are refused: no
rank would gather or average them. docs/frameworks.md says what to call instead.

`copy.deepcopy` of the module inside the wrapper, or of a unit, gives a module with shards of its
own, placed like the model's, so `torch.optim.swa_utils.AveragedModel(model.module)` averages
without communication. A copy does not compute: the hooks that it shares with the model refuse its
calls. To evaluate an average, load it into a sharded model.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterable
from functools import cache, partial
from typing import Any, NoReturn, Self
from weakref import WeakSet

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from mfsdp_core.errors import LifecycleError
from mfsdp_core.shard.chunk import offsets_of

#: Attribute of the module in the wrapper -> how it is used there.
_CALLS = {
    "generate": "All ranks call it together; pass synced_gpus=True where they may stop at "
    "different lengths.",
    "save_pretrained": "Give it whole weights: state = export_state_dict(model) on all ranks, then "
    "on the first one model.module.save_pretrained(folder, state_dict=state).",
    "merge_and_unload": "Merging changes parts of weights, which shards do not follow: load "
    "export_state_dict(model) into an unsharded model, and merge that.",
}
_OVERRIDDEN = ("__deepcopy__", "__reduce_ex__")
#: Every module of every sharded model.
_sharded: WeakSet[nn.Module] = WeakSet()


def _refuse_pickling(*_arguments: object) -> NoReturn:
    """What pickle meets in a sharded model.

    Raises:
        LifecycleError: always.
    """
    raise LifecycleError(
        "a sharded model cannot be pickled: a rank holds a part of it, and its hooks belong to "
        "this process. Save model.state_dict() with torch.distributed.checkpoint."
    )


class GuardedModule(nn.Module):
    """The part of the wrapper that frameworks reach by mistake."""

    def __getattr__(self, name: str) -> Any:
        """Raises AttributeError, which says where the module in the wrapper has `name`."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            inner = self._modules.get("module")
            if inner is None or name.startswith("__") or not hasattr(inner, name):
                raise
        advice = _CALLS.get(name, "")
        raise AttributeError(
            f"the wrapper of a sharded model has no {name!r}; the module in it has: "
            f"model.module.{name}. {advice}".rstrip()
        )

    @property
    def _ddp_params_and_buffers_to_ignore(self) -> Any:
        """What DistributedDataParallel asks of a module before it wraps it.

        Raises:
            LifecycleError: it does.
            AttributeError: somebody else, who reads every attribute, as torch.export does.
        """
        if sys._getframe(1).f_globals.get("__name__") != "torch.nn.parallel.distributed":
            raise AttributeError("_ddp_params_and_buffers_to_ignore")
        raise LifecycleError(
            "DistributedDataParallel was about to wrap a sharded model, whose gradients are "
            "averaged over ranks already. Do not wrap it. With accelerate leave it out of "
            "prepare(), or call prepare_model(model, evaluation_mode=True); the Trainer of "
            "transformers always wraps: write the loop yourself (docs/frameworks.md)."
        )

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        """Refuse moves and casts: parameters are views of buffers that they would be cut from.

        Raises:
            LifecycleError: `fn` changes the device or dtype.
        """
        del recurse  # there is nothing to recurse into
        _check_unmoved(self.parameters(), fn)
        return self

    def __deepcopy__(self, _memo: dict[int, Any]) -> Self:
        """Refuse: hooks and buffers would be shared with the copy.

        Raises:
            LifecycleError: always.
        """
        raise LifecycleError(
            "the wrapper of a sharded model cannot be copied. Copy the module in it, as in "
            "AveragedModel(model.module), copy its state_dict(), or shard a second module."
        )

    __reduce_ex__ = _refuse_pickling


def guard(model: nn.Module, units: Iterable[nn.Module], holders: Iterable[nn.Module]) -> None:
    """Apply the rules of this file to the modules of a sharded `model` from now on.

    units: the modules of units, the root among them. holders: modules that hold sharded parameters.
    """
    for holder in holders:
        holder._apply = partial(_apply_to_holder, holder)  # type: ignore[method-assign]
    for unit in units:
        unit.__deepcopy__ = partial(_copy_module, unit)  # type: ignore[assignment]
        unit.__reduce_ex__ = _refuse_pickling  # type: ignore[method-assign]
    _watch_registrations()
    _sharded.update(model.modules())


def _apply_to_holder(
    holder: nn.Module, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True
) -> nn.Module:
    own = holder._parameters
    sharded = {name: p for name, p in own.items() if p is not None and offsets_of(p) is not None}
    _check_unmoved(sharded.values(), fn)
    holder._parameters = {name: p for name, p in own.items() if name not in sharded}
    try:
        nn.Module._apply(holder, fn, recurse)
    finally:
        own.update(holder._parameters)
        holder._parameters = own
    return holder


def _check_unmoved(
    parameters: Iterable[torch.Tensor], fn: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    for parameter in parameters:
        probe = torch.empty(0, dtype=parameter.dtype, device=parameter.device)
        changed = fn(probe)
        if (changed.dtype, changed.device) != (probe.dtype, probe.device):
            raise LifecycleError(
                "a sharded model cannot change its dtype or device "
                f"({probe.dtype} on {probe.device} to {changed.dtype} on {changed.device}). "
                "Move or cast a module before it is sharded."
            )


def _copy_module(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """A copy over shards of its own.

    Raises:
        LifecycleError: the module is running.
    """
    for name, parameter in module.named_parameters():
        if offsets_of(parameter) is None:
            raise LifecycleError(
                f"{name} is gathered now: a module cannot be copied while it runs. Copy it between "
                "steps."
            )
    overrides = {name: vars(module).pop(name) for name in _OVERRIDDEN if name in vars(module)}
    try:
        copied: nn.Module = copy.deepcopy(module, memo)
    finally:
        vars(module).update(overrides)
    return copied


@cache
def _watch_registrations() -> None:
    register_module_parameter_registration_hook(_at_parameter)
    register_module_module_registration_hook(_at_module)


def _at_parameter(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
    if parameter is None or not parameter.requires_grad or name in module._parameters:
        return
    if module in _sharded:
        _refuse(f"parameter {name!r}", module)


def _at_module(module: nn.Module, name: str, child: nn.Module | None) -> None:
    if child is None or module not in _sharded:
        return
    added = [one for one in child.modules() if one not in _sharded]
    if any(p.requires_grad for one in added for p in one.parameters(recurse=False)):
        _refuse(f"module {name!r} with parameters", module)
    _sharded.update(added)


def _refuse(what: str, module: nn.Module) -> None:
    raise LifecycleError(
        f"trainable {what} was added to {type(module).__name__} after sharding. Nobody would "
        "average its gradients over ranks. Build the model, with adapters and parametrizations, "
        "before fully_shard_model, or freeze what is added."
    )
