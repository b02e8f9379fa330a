"""What frameworks try on a sharded model and would end obscurely: answered in words.

docs/frameworks.md says what to call instead.
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

#: Attribute of the module in the wrapper -> how it is used there.
_CALLS = {
    "generate": "All ranks call it together; pass synced_gpus=True where they may stop at "
    "different lengths.",
    "save_pretrained": "Give it whole weights: state = export_state_dict(model) on all ranks, then "
    "on the first one model.module.save_pretrained(folder, state_dict=state).",
    "merge_and_unload": "Merging changes parts of weights, which shards do not follow: load "
    "export_state_dict(model) into an unsharded model, and merge that.",
}


class AnswersFrameworks(nn.Module):
    """The part of the wrapper that frameworks meet by mistake."""

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


def refuse_moves(holders: Iterable[nn.Module]) -> None:
    """The same for the modules that hold the sharded parameters; their buffers follow `fn`."""
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
