"""State dicts of an optimizer: shards that say where they lie go out, shards or whole tensors in.

See [Note: analytic chunks]. A whole tensor is cut to this rank's rows, a shard must lie as this
rank's does, and anything else is refused before the optimizer is changed.

[Note: state before a step] torch makes state in the first step, and torch.distributed.checkpoint
fills only what is there: a load into a fresh optimizer would restore nothing, without an error
(R4). So a state dict holds what the first step would begin with, for every parameter that has no
state yet, made by the optimizer's own initialisation. Values and weights are not touched. Where
that is not known exactly (optimizers of others, SGD with dampening, whose first step is special),
the state dict of an optimizer that has not stepped can be saved, and is refused when it comes back,
since whatever was loaded into it has found no place.
"""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from mfsdp_core.errors import StateDictError
from mfsdp_core.shard.chunk import describe_like, offsets_of
from mfsdp_core.shard.dtensor import gather_full, local_tensor
from mfsdp_core.shard.uneven_shard import (
    cut_like,
    is_cut_alike,
    is_cut_by_torch,
    own_rows,
    shard_like,
)
from mfsdp_core.state.optimizer_parameters import ELEMENTWISE, numbered, parameters_of

#: State that is one number, also of a parameter that is one.
_NUMBERS = frozenset({"step", "eta", "mu", "mu_product"})
State = dict[str, Any]


def serve_state_dicts(optimizer: torch.optim.Optimizer) -> None:
    """Let `optimizer.state_dict` give described shards, and `load_state_dict` take whole tensors.

    An optimizer with methods of its own may make other tensors of what hooks have seen, and read
    what it is given rather than what hooks return.
    """
    optimizer.register_state_dict_pre_hook(complete_state)
    optimizer.register_state_dict_post_hook(_describe)
    patched: Any = optimizer
    if type(optimizer).state_dict is not torch.optim.Optimizer.state_dict:
        give = optimizer.state_dict

        def state_dict() -> State:
            state = give()
            _describe(optimizer, state)
            return state

        patched.state_dict = state_dict
    if type(optimizer).load_state_dict is torch.optim.Optimizer.load_state_dict:
        optimizer.register_load_state_dict_pre_hook(_take)
    else:
        load = optimizer.load_state_dict
        patched.load_state_dict = lambda state_dict: load(_take(optimizer, state_dict))


def complete_state(optimizer: torch.optim.Optimizer) -> None:
    """Give every trainable shard without state that which its first step would begin with."""
    for group in optimizer.param_groups if is_known(optimizer) else ():
        bare = [p for p in group["params"] if _is_bare(optimizer, p)]
        if bare:
            _initialise(optimizer, {**group, "params": bare})


def is_initial(state: State) -> bool:
    """Whether the state of one parameter is one that no step has changed (Adagrad begins with)."""
    step = state.get("step")
    return step is not None and float(step) == 0


def is_known(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the state that its first step begins with is known exactly."""
    return type(optimizer) in {*ELEMENTWISE, torch.optim.Muon}


def _initialise(optimizer: torch.optim.Optimizer, group: State) -> None:
    parameters: list[torch.Tensor] = group["params"]
    if isinstance(optimizer, torch.optim.SGD):
        # No momentum is no state, and dampening leaves out the first step.
        if group["momentum"] and not group["dampening"]:
            for parameter in parameters:
                zeros = torch.zeros_like(parameter, memory_format=torch.preserve_format).detach()
                optimizer.state[parameter]["momentum_buffer"] = zeros
        return
    if isinstance(optimizer, torch.optim.Adagrad):
        value = group["initial_accumulator_value"]
        for parameter in parameters:
            # As it is made when the optimizer is built.
            total = torch.full_like(parameter, value, memory_format=torch.preserve_format).detach()
            optimizer.state[parameter] = {
                "step": torch.tensor(0.0, dtype=torch.float32),
                "sum": total,
            }
        return
    initialise: Callable[..., Any] = optimizer._init_group  # type: ignore[attr-defined]
    lists = [[] for _ in list(inspect.signature(initialise).parameters)[1:]]  # type: ignore[var-annotated]
    gradients = [parameter.grad for parameter in parameters]
    try:
        for parameter in parameters:
            # Only its shape and dtype are read, so it needs no memory of its own.
            parameter.grad = parameter.detach()
        initialise(group, *lists)
    finally:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient


def _is_bare(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> bool:
    is_sharded = offsets_of(parameter) is not None
    return is_sharded and parameter.requires_grad and not optimizer.state.get(parameter)


class _Unfillable(dict[Any, Any]):
    """The empty state of an optimizer that has not stepped; saved, it is a plain dict."""

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return OrderedDict, ()  # which torch.load takes, and which is as empty


def _describe(optimizer: torch.optim.Optimizer, state_dict: State) -> None:
    """Describe the shards in a state dict, and mark one that could not be filled."""
    for number, parameter in numbered(optimizer, state_dict):
        for value in state_dict["state"].get(number, {}).values():
            describe_like(cut_like(value, parameter), parameter)
    is_plain = type(optimizer) is torch.optim.SGD
    makes = not is_plain or any(group["momentum"] for group in optimizer.param_groups)
    lacks = any(_is_bare(optimizer, p) for p in parameters_of(optimizer))
    if not state_dict["state"] and lacks and makes:
        state_dict["state"] = _Unfillable()


def _take(optimizer: torch.optim.Optimizer, state_dict: State) -> State:
    """The state dict with every value sharded as its parameter is."""
    if isinstance(state_dict["state"], _Unfillable):
        raise StateDictError(
            f"this state dict was made before {type(optimizer).__name__} had stepped, and holds no "
            "places for state, so nothing that was loaded into it has been kept. Load with "
            "load_checkpoint, which needs none, or take the state dict after a first step."
        )
    parameters = dict(numbered(optimizer, state_dict))
    if not parameters:
        return state_dict  # torch refuses it in its own words
    strict = type(optimizer) in ELEMENTWISE
    state = {
        number: {
            name: _as_shard(f"{name} of parameter {number}", name, value, parameter, strict=strict)
            for name, value in values.items()
        }
        if isinstance(parameter := parameters.get(number), DTensor)
        and offsets_of(parameter) is not None
        else values
        for number, values in state_dict["state"].items()
    }
    return {**state_dict, "state": state}


def _as_shard(what: str, name: str, value: Any, parameter: DTensor, *, strict: bool) -> Any:
    """`value` sharded as `parameter` is. strict: state has the parameter's shape or is a number."""
    if not isinstance(value, torch.Tensor) or (value.ndim == 0 and name in _NUMBERS):
        return value
    shape = tuple(parameter.shape)
    is_whole = tuple(value.shape) == shape or (shape == (1,) and value.ndim == 0)
    if not is_whole and not strict:
        return value  # nobody knows what it is
    offsets, local = offsets_of(parameter), local_tensor(parameter)
    assert offsets is not None
    given = f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, DTensor):
        own = tuple(local_tensor(value).shape)
        given = f"a shard of shape {own} of {tuple(value.shape)}, placed {tuple(value.placements)}"
        if is_whole and is_cut_alike(value, parameter):
            if value.device_mesh is parameter.device_mesh:
                return value
            # What was pickled has a mesh of its own, equal to the parameter's.
            return _like(local_tensor(value), parameter)
        is_whole = is_whole and is_cut_by_torch(value)
        value = gather_full(value) if is_whole else value
    if is_whole:
        return _like(own_rows(value, parameter).to(local.device, copy=True), parameter)
    raise StateDictError(
        f"{what}: expected the whole tensor of shape {shape}, or the rows {offsets} to "
        f"{tuple(o + n for o, n in zip(offsets, local.shape, strict=True))} of it as a DTensor; "
        f"found {given}. To load what other ranks or another strategy saved, use "
        "save_checkpoint and load_checkpoint, or torch.distributed.checkpoint."
    )


def _like(local: torch.Tensor, parameter: DTensor) -> DTensor:
    shard = shard_like(local, parameter)
    describe_like(shard, parameter)
    return shard
