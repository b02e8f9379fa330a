"""Loading a model's state dict into sharded main weights: all of it, or nothing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from mfsdp_core.errors import StateDictError
from mfsdp_core.runtime.bucket import Bucket, ManagedParameter
from mfsdp_core.shard.dtensor import gather_full, name_tensor
from mfsdp_core.shard.uneven_shard import cut_of, is_cut_alike, is_cut_by_torch

#: What the wrapper puts before every name.
PREFIX = "module."

#: A parameter (bucket and index in it), the name it was found under, and the value.
_Found = tuple[Bucket, int, str, torch.Tensor]


def load_model_state(
    model: nn.Module,
    buckets: list[Bucket],
    state_dict: Mapping[str, Any],
    *,
    strict: bool,
    prefix: str = PREFIX,
    assign: bool = False,
) -> Any:
    """Write parameters into the main weights and buffers into their modules.

    Values are whole tensors, DTensors sharded as the model is, or DTensors that torch has cut over
    the model's one axis, which are gathered. The caller installs the weights.
    prefix: of all names. assign: buffers become the tensors of the state dict.
    A tied parameter is loaded from whichever of its names is present. Nothing is written unless
    everything can be (R18).

    Raises:
        StateDictError: see `MegatronFSDP.load_state_dict`.
    """
    found, missing = _match_parameters(buckets, state_dict, prefix)
    parameters = {prefix + n for bucket in buckets for p in bucket.parameters for n in p.names}
    rest = {name: value for name, value in state_dict.items() if name not in parameters}
    own_rest = {n: v for n, v in nn.Module.state_dict(model).items() if n not in parameters}
    missing += [name for name in own_rest if name not in rest]
    unexpected = [name for name in rest if name not in own_rest]
    fits = len(state_dict) - len(unexpected)
    if strict and (missing or unexpected):
        raise StateDictError(
            f"the state dict does not fit the model. Missing: {missing or 'none'}. Unexpected: "
            f"{unexpected or 'none'}. {_names_wanted(unexpected, missing, prefix)}; strict=False "
            "loads a part."
        )
    if state_dict and not fits:
        raise StateDictError(
            "no name of the state dict is one of the model: nothing would be loaded. Found "
            f"{unexpected[:3]}, expected such as {missing[:3]}. "
            f"{_names_wanted(unexpected, missing, prefix)}."
        )
    for bucket, index, name, value in found:
        _check_parameter(bucket, index, name, value)
    for name, own in own_rest.items():
        if name in rest:
            _check_buffer(name, own, rest[name])
    for bucket, index, _, value in found:
        _load_parameter(bucket, index, value)
    result = nn.Module.load_state_dict(model, rest, strict=False, assign=assign)
    return type(result)(missing, unexpected)


def _names_wanted(unexpected: list[str], missing: list[str], prefix: str) -> str:
    """How names begin, and how to get there from those of the module before it was sharded."""
    if not prefix:
        return "Names are those of the module"
    if not {prefix + name for name in unexpected} & set(missing):
        return f"Names start with {prefix!r}"
    return (
        f"Its names have no prefix {prefix!r}: load "
        f"{{'{prefix}' + name: value for name, value in state_dict.items()}}"
    )


def _match_parameters(
    buckets: list[Bucket], state_dict: Mapping[str, Any], prefix: str
) -> tuple[list[_Found], list[str]]:
    """Every parameter's value, and the first names of those that have none."""
    found: list[_Found] = []
    missing: list[str] = []
    for bucket in buckets:
        for index, managed in enumerate(bucket.parameters):
            names = [prefix + name for name in managed.names]
            present = next((name for name in names if name in state_dict), None)
            if present is None:
                missing.append(names[0])
            else:
                found.append((bucket, index, present, state_dict[present]))
    return found, missing


def _check_parameter(bucket: Bucket, index: int, name: str, value: object) -> None:
    managed = bucket.parameters[index]
    sharded, shape = managed.sharded, managed.part.whole_shape
    if not isinstance(value, torch.Tensor):
        raise StateDictError(
            f"{name}: expected a tensor of shape {shape}, found {type(value).__name__}."
        )
    if tuple(value.shape) not in (shape, tuple(sharded.shape)):
        raise StateDictError(f"{name}: expected shape {shape}, found {tuple(value.shape)}.")
    if not isinstance(value, DTensor) or _is_on_tensor_axis_alone(managed, value):
        return
    if id(value) == id(sharded) and cut_of(value) is not None and managed.was_changed:
        raise StateDictError(
            f"{name}: set_model_state_dict(broadcast_from_rank0=True) has written rows where torch "
            "would cut them, and this model is cut elsewhere: its weights are wrong now. Give all "
            "ranks the whole tensors: full_state_dict=True alone, or model.load_state_dict()."
        )
    if not _is_sharded_alike(value, sharded) and not is_cut_by_torch(value):
        raise StateDictError(
            f"{name}: its shard has shape {tuple(value.to_local().shape)}, or lies elsewhere than "
            "this model's. Load whole tensors (gather_full), or save and load with "
            "save_checkpoint and load_checkpoint, which reshard."
        )


def _is_on_tensor_axis_alone(managed: ManagedParameter, value: DTensor) -> bool:
    """Whether `value` is placed as the module was before sharding."""
    return managed.part.placement is not None and value.placements == (managed.part.placement,)


def _is_sharded_alike(value: DTensor, sharded: torch.Tensor) -> bool:
    return isinstance(sharded, DTensor) and is_cut_alike(value, sharded)


def _check_buffer(name: str, own: object, value: object) -> None:
    if not isinstance(own, torch.Tensor):
        return  # extra state: the module that takes it knows what it must be
    found = tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
    if found != tuple(own.shape):
        raise StateDictError(f"{name}: expected shape {tuple(own.shape)}, found {found}.")


def _load_parameter(bucket: Bucket, index: int, value: torch.Tensor) -> None:
    if not isinstance(value, DTensor):
        bucket.load(index, value)
        return
    managed = bucket.parameters[index]
    if _is_on_tensor_axis_alone(managed, value):
        bucket.load_part(index, value.to_local())
        return
    if not _is_sharded_alike(value, managed.sharded):
        name_tensor(value, f"what is loaded into {managed.names[0]}")
        bucket.load(index, gather_full(value))
        return
    target = bucket.local_view(index, bucket.weights.main)
    local = value.to_local()
    if target.data_ptr() != local.data_ptr() or target.dtype != local.dtype:
        target.copy_(local)


def show_shards_to_state_dicts(
    holders: Iterable[nn.Module], shards: Mapping[nn.Parameter, nn.Parameter]
) -> None:
    """Let state dicts hold shards while a unit runs, and after a pass that has raised.

    shards: by the parameter that modules compute with.
    """
    shown: list[dict[str, nn.Parameter | None]] = []

    def show(module: nn.Module, *_: object) -> None:
        shown.append(dict(module._parameters))
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = shards.get(parameter, parameter)

    def restore(module: nn.Module, *_: object) -> None:
        module._parameters.update(shown.pop())

    for holder in holders:
        holder.register_state_dict_pre_hook(show)
        holder.register_state_dict_post_hook(restore)
