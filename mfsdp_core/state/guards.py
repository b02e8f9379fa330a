"""What users and frameworks try on a sharded model besides training, and what happens then.

Moves, casts, copies of the wrapper and DDP around it are refused. docs/frameworks.md says what to
call instead.

`copy.deepcopy` of the module inside the wrapper, or of a unit, gives a module with shards of its
own, placed like the model's, so `torch.optim.swa_utils.AveragedModel(model.module)` averages
without communication. A copy does not compute: the hooks that it shares with the model refuse its
calls. To evaluate an average, load it into a sharded model.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Self

import torch
from torch import nn

from mfsdp_core.errors import LifecycleError
from mfsdp_core.shard.chunk import offsets_of


class GuardedModule(nn.Module):
    """The part of the wrapper that frameworks reach by mistake."""

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


def guard(holders: Iterable[nn.Module]) -> None:
    """Refuse moves and casts of the modules that hold sharded parameters from now on."""
    for holder in holders:
        holder._apply = partial(_apply_to_holder, holder)  # type: ignore[method-assign]


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
