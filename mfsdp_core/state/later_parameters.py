"""Parameters that come to a model after it was sharded, which no rank would gather or average."""

from __future__ import annotations

from functools import cache
from weakref import WeakSet

from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from mfsdp_core.errors import LifecycleError

_sharded: WeakSet[nn.Module] = WeakSet()


def refuse_later_parameters(model: nn.Module) -> None:
    """From now on, refuse trainable parameters under new names in `model`, by a `LifecycleError`.

    What is put in the place of a sharded parameter is found when its unit runs.
    """
    _watch_registrations()
    _sharded.update(model.modules())


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
