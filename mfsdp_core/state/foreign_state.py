"""Optimizer state that comes from somewhere else: from `torch.load`, or from an unsharded run.

A whole tensor is cut to this rank's rows, a shard must lie as this rank's does, and anything else
is refused before the optimizer is changed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from mfsdp_core.errors import StateDictError
from mfsdp_core.shard.chunk import offsets_of
from mfsdp_core.shard.dtensor import gather_full, local_tensor
from mfsdp_core.shard.uneven_shard import is_cut_alike, is_cut_by_torch, own_rows, shard_like
from mfsdp_core.state.described import describe_like
from mfsdp_core.state.local_step import ELEMENTWISE
from mfsdp_core.state.owner import numbered

#: State that is one number, also of a parameter that is one.
_NUMBERS = frozenset({"step", "eta", "mu", "mu_product"})


def accept_foreign_state(optimizer: torch.optim.Optimizer) -> None:
    """Let `optimizer.load_state_dict` take whole tensors, and check the shards that it is given."""
    if type(optimizer).load_state_dict is torch.optim.Optimizer.load_state_dict:
        optimizer.register_load_state_dict_pre_hook(_shard_state)
        return
    base = optimizer.load_state_dict  # one that reads what it is given, not what hooks return

    def load_state_dict(state_dict: dict[str, Any]) -> None:
        base(_shard_state(optimizer, state_dict))

    optimizer.load_state_dict = load_state_dict  # type: ignore[method-assign]


def _shard_state(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    parameters = dict(numbered(optimizer, state_dict))
    if not parameters:
        return state_dict  # torch refuses it in its own words
    strict = type(optimizer) in ELEMENTWISE
    state = {
        number: {
            name: _as_shard(f"{name} of parameter {number}", name, value, parameter, strict=strict)
            for name, value in values.items()
        }
        if (parameter := parameters.get(number)) is not None and _is_sharded(parameter)
        else values
        for number, values in state_dict["state"].items()
    }
    return {**state_dict, "state": state}


def _is_sharded(parameter: torch.Tensor) -> bool:
    return isinstance(parameter, DTensor) and offsets_of(parameter) is not None


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
    if is_whole and isinstance(value, DTensor) and not is_cut_alike(value, parameter):
        value = gather_full(value) if is_cut_by_torch(value) else value
    if is_whole and not isinstance(value, DTensor):
        return _like(own_rows(value, parameter).to(local.device, copy=True), parameter)
    if is_whole and isinstance(value, DTensor) and is_cut_alike(value, parameter):
        # What was pickled has a mesh of its own, equal to the parameter's.
        return (
            value
            if value.device_mesh is parameter.device_mesh
            else _like(local_tensor(value), parameter)
        )
    raise StateDictError(
        f"{what}: expected the whole tensor of shape {shape}, or the rows {offsets} to "
        f"{tuple(o + n for o, n in zip(offsets, local.shape, strict=True))} of it as a DTensor; "
        f"found {_found(value)}. To load what other ranks or another strategy saved, use "
        "save_checkpoint and load_checkpoint, or torch.distributed.checkpoint."
    )


def _like(local: torch.Tensor, parameter: DTensor) -> DTensor:
    shard = shard_like(local, parameter)
    describe_like(shard, parameter)
    return shard


def _found(value: torch.Tensor) -> str:
    if not isinstance(value, DTensor):
        return f"a tensor of shape {tuple(value.shape)}"
    local = tuple(local_tensor(value).shape)
    return f"a shard of shape {local} of {tuple(value.shape)}, placed {tuple(value.placements)}"
