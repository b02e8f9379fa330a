"""Copies of a sharded module, such as `torch.optim.swa_utils.AveragedModel(model.module)` makes.

`copy.deepcopy` of a sharded module, or of one of its units, gives a module with shards of its own,
placed as the model's are. What averages weights works on those without communication. A call of the
copy gathers the main weights of each unit for as long as the unit runs, in the dtype that the model
computes in; all ranks call it together, as they do the model. A copy evaluates and does not train:
gradients have nowhere to go, so a call that would record them is refused.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any, NoReturn

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from mfsdp_core.errors import LifecycleError
from mfsdp_core.runtime.hooks import is_runtime_hook
from mfsdp_core.shard.chunk import offsets_of, remember_offsets
from mfsdp_core.shard.dtensor import agree_to_read, assemble, local_tensor
from mfsdp_core.shard.uneven_shard import shard_like

#: Attribute of a shard: dtype and shape in which its module computes; a sharded scalar is one row.
COMPUTES_AS = "_mfsdp_computes_as"
#: Attribute of a copied module that gathers for its own calls.
_GATHERS = "_mfsdp_gathers"
_OVERRIDDEN = ("__deepcopy__", "__reduce_ex__")


def allow_copies(modules: Iterable[nn.Module], parameters: Iterable[nn.Parameter]) -> None:
    """Let `copy.deepcopy` copy the units and the root of a sharded model, and its shards."""
    for module in modules:
        module.__deepcopy__ = partial(_copy_module, module)  # type: ignore[assignment]
        module.__reduce_ex__ = refuse_pickling  # type: ignore[method-assign]
    for parameter in parameters:
        parameter.__deepcopy__ = partial(_copy_shard, parameter)  # type: ignore[method-assign]


def refuse_pickling(*_arguments: object) -> NoReturn:
    """What pickle meets in a sharded model.

    Raises:
        LifecycleError: always.
    """
    raise LifecycleError(
        "a sharded model cannot be pickled: a rank holds a part of it, and its hooks belong to "
        "this process. Save model.state_dict() with torch.distributed.checkpoint."
    )


def _copy_shard(parameter: nn.Parameter, memo: dict[int, Any]) -> nn.Parameter:
    """A shard with memory of its own; it belongs to no model, so that no optimizer moves one."""
    shard: Any = parameter.detach()
    assert isinstance(shard, DTensor)
    local = local_tensor(shard).clone(memory_format=torch.preserve_format)
    copied = nn.Parameter(shard_like(local, shard), requires_grad=parameter.requires_grad)
    offsets = offsets_of(parameter)
    assert offsets is not None
    remember_offsets(copied, offsets)
    setattr(copied, COMPUTES_AS, getattr(parameter, COMPUTES_AS))
    copied.__deepcopy__ = partial(_copy_shard, copied)  # type: ignore[method-assign]
    memo[id(parameter)] = copied
    return copied


def _copy_module(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """A copy without the hooks of the runtime, which gathers its own weights.

    Raises:
        LifecycleError: the module is running, or a weight is cut by tensor parallelism.
    """
    _check_copyable(module)
    overrides = {name: vars(module).pop(name) for name in _OVERRIDDEN if name in vars(module)}
    try:
        copied: nn.Module = copy.deepcopy(module, memo)
    finally:
        vars(module).update(overrides)
    vars(copied)["__deepcopy__"] = partial(_copy_module, copied)
    for hooks in (copied._forward_pre_hooks, copied._forward_hooks):
        for number in [n for n, hook in hooks.items() if is_runtime_hook(hook)]:
            del hooks[number]
    if not hasattr(copied, _GATHERS):
        setattr(copied, _GATHERS, True)
        gathering = _Gathering()
        copied.register_forward_pre_hook(gathering.before, prepend=True)
        copied.register_forward_hook(gathering.after, always_call=True)
    return copied


def _check_copyable(module: nn.Module) -> None:
    for name, parameter in module.named_parameters():
        if not isinstance(parameter, DTensor) or offsets_of(parameter) is None:
            raise LifecycleError(
                f"{name} is gathered now: a module cannot be copied while it runs. Copy it between "
                "steps."
            )
        if not hasattr(parameter, COMPUTES_AS):
            raise LifecycleError(
                f"{name} is cut by tensor parallelism, so a copy of its module could not evaluate. "
                "Copy the state_dict() instead."
            )


class _Gathering:
    """Whole weights in the place of shards, for one call of a copied module."""

    def __init__(self) -> None:
        self._shards: list[tuple[nn.Module, str, nn.Parameter]] = []
        self._calls = 0

    def __deepcopy__(self, _memo: dict[int, Any]) -> _Gathering:
        return _Gathering()

    def before(self, module: nn.Module, _args: Any) -> None:
        """Gather, unless the module calls itself."""
        self._calls += 1
        if self._calls > 1:
            return
        self._shards = list(_own_shards(module))
        if torch.is_grad_enabled() and any(shard.requires_grad for _, _, shard in self._shards):
            self._shards = []
            raise LifecycleError(
                "a copy of a sharded module evaluates, it does not train: its weights would get no "
                "gradients. Call it under torch.no_grad(), or freeze it with requires_grad_(False)."
            )
        agree_to_read([shard for _, _, shard in self._shards if isinstance(shard, DTensor)])
        whole: dict[int, nn.Parameter] = {}
        for holder, name, shard in self._shards:
            if id(shard) not in whole:
                dtype, shape = getattr(shard, COMPUTES_AS)
                value = assemble(shard.detach()).to(dtype).view(shape)
                whole[id(shard)] = nn.Parameter(value, requires_grad=False)
            holder._parameters[name] = whole[id(shard)]

    def after(self, _module: nn.Module, _args: Any, _output: Any) -> None:
        """Put the shards back, also after an exception."""
        self._calls -= 1
        if not self._calls:
            for holder, name, shard in self._shards:
                holder._parameters[name] = shard
            self._shards = []


def _own_shards(module: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
    """Shards in `module` and below, without those of modules that gather for themselves."""
    for name, parameter in module._parameters.items():
        if parameter is not None and offsets_of(parameter) is not None:
            yield module, name, parameter
    for child in module._modules.values():
        if child is not None and not hasattr(child, _GATHERS):
            yield from _own_shards(child)
