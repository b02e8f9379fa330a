"""State of an optimizer that has not stepped yet, made without a step (R4).

torch makes state in the first step, and torch.distributed.checkpoint fills only what is there: a
load into a fresh optimizer would restore nothing, without an error. So a state dict holds what the
first step would begin with, for every parameter that has no state yet, made by the optimizer's own
initialisation. Values and weights are not touched.

Where that is not known exactly (optimizers of others, SGD with dampening, whose first step is
special), the state dict of an optimizer that has not stepped can be saved, and is refused when it
comes back, since whatever was loaded into it has found no place.
"""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch

from mfsdp_core.errors import StateDictError
from mfsdp_core.shard.chunk import offsets_of
from mfsdp_core.state.local_step import ELEMENTWISE


def offer_state(optimizer: torch.optim.Optimizer) -> None:
    """Make state dicts of `optimizer` complete, or refuse the ones that could not be filled."""
    optimizer.register_state_dict_pre_hook(complete_state)
    optimizer.register_state_dict_post_hook(_mark_unfillable)
    optimizer.register_load_state_dict_pre_hook(_refuse_unfillable)


def complete_state(optimizer: torch.optim.Optimizer) -> None:
    """Give every trainable shard without state that which its first step would begin with."""
    for group in optimizer.param_groups:
        if not is_known(optimizer) or _is_special_sgd(optimizer, group):
            continue
        bare = [p for p in group["params"] if _is_bare(optimizer, p)]
        if bare:
            _initialise(optimizer, {**group, "params": bare})


def is_initial(state: dict[str, Any]) -> bool:
    """Whether the state of one parameter is one that no step has changed (Adagrad begins with)."""
    step = state.get("step")
    return step is not None and float(step) == 0


def _initialise(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> None:
    parameters: list[torch.Tensor] = group["params"]
    if isinstance(optimizer, torch.optim.SGD):
        for parameter in parameters:
            zeros = torch.zeros_like(parameter, memory_format=torch.preserve_format).detach()
            optimizer.state[parameter]["momentum_buffer"] = zeros
        return
    if isinstance(optimizer, torch.optim.Adagrad):
        for parameter in parameters:
            optimizer.state[parameter] = adagrad_state(group, parameter)
        return
    initialise: Callable[..., Any] = optimizer._init_group  # type: ignore[attr-defined]
    lists = [[] for _ in list(inspect.signature(initialise).parameters)[1:]]  # type: ignore[var-annotated]
    gradients = [parameter.grad for parameter in parameters]
    try:
        for parameter in parameters:
            # It is asked for its shape and dtype alone; so it needs no memory of its own.
            parameter.grad = parameter.detach()
        initialise(group, *lists)
    finally:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient


def adagrad_state(group: dict[str, Any], parameter: torch.Tensor) -> dict[str, Any]:
    """What `torch.optim.Adagrad` makes when it is built, for a parameter it was not built over."""
    value = group["initial_accumulator_value"]
    total = torch.full_like(parameter, value, memory_format=torch.preserve_format).detach()
    return {"step": torch.tensor(0.0, dtype=torch.float32), "sum": total}


def is_known(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the state that its first step begins with is known exactly."""
    return type(optimizer) in {*ELEMENTWISE, torch.optim.Muon}


def _is_special_sgd(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> bool:
    """No momentum is no state, and dampening leaves out the first step."""
    if not isinstance(optimizer, torch.optim.SGD):
        return False
    return not group["momentum"] or bool(group["dampening"])


def _is_bare(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> bool:
    is_sharded = offsets_of(parameter) is not None
    return is_sharded and parameter.requires_grad and not optimizer.state.get(parameter)


class _Unfillable(dict[Any, Any]):
    """The empty state of an optimizer that has not stepped; saved, it is a plain dict."""

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return OrderedDict, ()  # which torch.load takes, and which is as empty


def _mark_unfillable(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
    lacks = any(_is_bare(optimizer, p) for g in optimizer.param_groups for p in g["params"])
    if not state_dict["state"] and lacks and _makes_state(optimizer):
        state_dict["state"] = _Unfillable()


def _makes_state(optimizer: torch.optim.Optimizer) -> bool:
    plain = type(optimizer) is torch.optim.SGD
    return not plain or any(group["momentum"] for group in optimizer.param_groups)


def _refuse_unfillable(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
    if isinstance(state_dict["state"], _Unfillable):
        raise StateDictError(
            f"this state dict was made before {type(optimizer).__name__} had stepped, and holds no "
            "places for state, so nothing that was loaded into it has been kept. Load with "
            "load_checkpoint, which needs none, or take the state dict after a first step."
        )
