"""Memory and initial values of a model that was built without them.

[Note: models on the meta device] A model is built there, and its modules can draw their parameters
(`reset_parameters`). It gets memory and values as a whole or, from an engine that can, unit by
unit: draw all of a unit, keep the own shard, go on. Values are the same either way.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from bench.models.initial_values import initial_value


def give_resets(model: nn.Module, residual_writes: int, seed: int) -> None:
    """Let `reset_parameters` of every module draw its own parameters, once.

    A tied parameter has its first name, whichever of its modules draws it. The FP32 values of one
    that holds less are kept as Transformer Engine keeps them: see `_keep_drawn`.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for module in model.modules():
        own = {
            attribute: names[id(parameter)]
            for attribute, parameter in module._parameters.items()
            if parameter is not None
        }
        if own:
            reset = partial(_draw, module, own, residual_writes, seed)
            module.reset_parameters = reset  # type: ignore[assignment]


def materialise(module: nn.Module, device: torch.device) -> None:
    """Give parameters of `module` on the meta device memory and values; tied ones stay one."""
    made: dict[int, nn.Parameter] = {}
    for owner in list(module.modules()):
        waiting = [n for n, p in owner._parameters.items() if p is not None and p.is_meta]
        for attribute in waiting:
            meta: Any = owner._parameters[attribute]
            if id(meta) not in made:
                empty = torch.empty_like(meta, device=device)
                made[id(meta)] = nn.Parameter(empty, requires_grad=meta.requires_grad)
            owner._parameters[attribute] = made[id(meta)]
        if waiting:
            owner.reset_parameters(keeps_drawn=False)  # type: ignore[operator]


@torch.no_grad()
def _draw(
    module: nn.Module,
    names: Mapping[str, str],
    residual_writes: int,
    seed: int,
    *,
    keeps_drawn: bool = True,
) -> None:
    """names: of the parameters in the model, by their attributes in `module`."""
    for attribute, name in names.items():
        parameter = getattr(module, attribute)
        value = initial_value(name, parameter.shape, residual_writes=residual_writes, seed=seed)
        parameter.copy_(value)
        if keeps_drawn and parameter.dtype != torch.promote_types(parameter.dtype, value.dtype):
            _keep_drawn(parameter, value)
    del module.reset_parameters  # which refers to the module


def _keep_drawn(parameter: Any, value: Tensor) -> None:
    """Offer the exact values of a rounded parameter to whoever creates its main weights."""
    alive = weakref.ref(parameter)

    def forget() -> None:
        for name in ("get_high_precision_init_val", "clear_high_precision_init_val"):
            delattr(alive(), name)

    parameter.get_high_precision_init_val = lambda: value
    parameter.clear_high_precision_init_val = forget
