"""Modules that hold shards: their state dicts, what they load (all of it, or nothing), their moves.

State dicts hold described shards, whatever `preproc_state_dict_for_dcp_ckpt` says: that costs no
communication, and without it a checkpoint would be silently wrong (see [Note: analytic chunks]).

`copy.deepcopy` of the module inside the wrapper, or of a unit, gives a module with shards of its
own, placed like the model's, so `torch.optim.swa_utils.AveragedModel(model.module)` averages
without communication. A copy does not compute: the hooks that it shares with the model refuse its
calls. To evaluate an average, load it into a sharded model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any
from weakref import WeakSet

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from mfsdp_core.errors import LifecycleError, Refusal, StateDictError, refuse
from mfsdp_core.runtime.bucket import Bucket
from mfsdp_core.runtime.parameters import ManagedParameter
from mfsdp_core.shard.chunk import describe_like, offsets_of
from mfsdp_core.shard.dtensor import gather_full, name_tensor, without_offset
from mfsdp_core.shard.uneven_shard import cut_like, cut_of, is_cut_alike, is_cut_by_torch, own_rows

#: What the wrapper puts before every name.
PREFIX = "module."
#: Attribute of a parameter that modules compute with: its shard.
_SHARD = "_mfsdp_shard"
#: Modules with hooks of `serve_holders`.
_served: WeakSet[nn.Module] = WeakSet()

_WRITTEN_ELSEWHERE = (
    "{name}: set_model_state_dict(broadcast_from_rank0=True) has written rows where torch would "
    "cut them, and this model is cut elsewhere: its weights are wrong now. Give all ranks the "
    "whole tensors: full_state_dict=True alone, or model.load_state_dict()."
)
_LIES_ELSEWHERE = (
    "{name}: its shard has shape {found}, or lies elsewhere than this model's. Load whole tensors "
    "(gather_full), or save and load with save_checkpoint and load_checkpoint, which reshard."
)


def shard_of(parameter: nn.Parameter) -> nn.Parameter:
    """The shard that stands for a parameter that modules compute with; any other one itself."""
    shard: nn.Parameter = getattr(parameter, _SHARD, parameter)
    return shard


def serve_holders(parameters: Iterable[ManagedParameter], *, moves: bool = False) -> None:
    """Let state dicts of the modules that hold `parameters` have described shards.

    Also while a unit runs, and after a pass that has raised. moves: whether they may be moved and
    cast, which is refused otherwise.
    """
    for managed in parameters:
        setattr(managed.raw, _SHARD, managed.sharded)
        for holder, _ in managed.holders:
            if not moves:
                holder._apply = partial(_apply_to_holder, holder)  # type: ignore[method-assign]
            if holder not in _served:
                _served.add(holder)
                shown: list[dict[str, nn.Parameter | None]] = []
                holder.register_state_dict_pre_hook(partial(_show_shards, shown))
                holder.register_state_dict_post_hook(partial(_describe, shown))


def _show_shards(
    shown: list[dict[str, nn.Parameter | None]], module: nn.Module, *_: object
) -> None:
    shown.append(dict(module._parameters))
    for name, parameter in module._parameters.items():
        module._parameters[name] = None if parameter is None else shard_of(parameter)


def _describe(
    shown: list[dict[str, nn.Parameter | None]],
    module: nn.Module,
    state_dict: dict[str, Any],
    prefix: str,
    _metadata: Any,
) -> None:
    """Values share memory with the model, and can be saved and copied."""
    for attribute, parameter in module._parameters.items():
        value = state_dict.get(prefix + attribute)
        if parameter is None or offsets_of(parameter) is None or not isinstance(value, DTensor):
            continue
        if not isinstance(value, nn.Parameter):  # keep_vars=True asks for the parameter itself
            value = state_dict[prefix + attribute] = cut_like(without_offset(value), parameter)
        describe_like(value, parameter)
    module._parameters.update(shown.pop())


def _apply_to_holder(
    holder: nn.Module, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True
) -> nn.Module:
    own = holder._parameters
    sharded = {name: p for name, p in own.items() if p is not None and offsets_of(p) is not None}
    refuse_moves(sharded.values(), fn)
    holder._parameters = {name: p for name, p in own.items() if name not in sharded}
    try:
        nn.Module._apply(holder, fn, recurse)
    finally:
        own.update(holder._parameters)
        holder._parameters = own
    return holder


def refuse_moves(
    parameters: Iterable[torch.Tensor], fn: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    """Refuse a move or a cast: parameters are views of buffers that they would be cut from.

    Raises:
        LifecycleError: `fn` changes the device or dtype.
    """
    for parameter in parameters:
        probe = torch.empty(0, dtype=parameter.dtype, device=parameter.device)
        changed = fn(probe)
        if (changed.dtype, changed.device) != (probe.dtype, probe.device):
            raise LifecycleError(
                "a sharded model cannot change its dtype or device "
                f"({probe.dtype} on {probe.device} to {changed.dtype} on {changed.device}). "
                "Move or cast a module before it is sharded."
            )


def bare_values(model: nn.Module) -> tuple[dict[str, Any], dict[str, str]]:
    """The state dict by the bare module's names, tied values once; other names of tied ones."""
    first: dict[int, str] = {}
    aliases: dict[str, str] = {}
    for full_name, parameter in model.named_parameters(remove_duplicate=False):
        name = full_name.removeprefix(PREFIX)
        if first.setdefault(id(parameter), name) != name:
            aliases[name] = first[id(parameter)]
    named = {name.removeprefix(PREFIX): value for name, value in model.state_dict().items()}
    return {name: value for name, value in named.items() if name not in aliases}, aliases


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
    named: list[tuple[Bucket, int, str]] = []
    missing: list[str] = []
    parameters: set[str] = set()
    for bucket in buckets:
        for index, managed in enumerate(bucket.parameters):
            names = [prefix + name for name in managed.names]
            parameters.update(names)
            present = next((name for name in names if name in state_dict), None)
            if present is None:
                missing.append(names[0])
            else:
                named.append((bucket, index, present))
    rest = {name: value for name, value in state_dict.items() if name not in parameters}
    own_rest = {n: v for n, v in nn.Module.state_dict(model).items() if n not in parameters}
    missing += [name for name in own_rest if name not in rest]
    unexpected = [name for name in rest if name not in own_rest]
    wanted = _names_wanted(unexpected, missing, prefix)
    refuse(
        [
            (
                strict and (missing or unexpected),
                StateDictError,
                f"the state dict does not fit the model. Missing: {missing or 'none'}. Unexpected: "
                f"{unexpected or 'none'}. {wanted}; strict=False loads a part.",
            ),
            (
                state_dict and len(state_dict) == len(unexpected),
                StateDictError,
                "no name of the state dict is one of the model: nothing would be loaded. Found "
                f"{unexpected[:3]}, expected such as {missing[:3]}. {wanted}.",
            ),
        ]
    )
    for bucket, index, name in named:
        refuse(_wrong_value(bucket.parameters[index], name, state_dict[name]))
    for name, own in own_rest.items():
        # Of extra state, the module that takes it knows what it must be.
        if name in rest and isinstance(own, torch.Tensor):
            refuse([_wrong_shape(name, (own.shape,), rest[name])])
    for bucket, index, name in named:
        _load_parameter(bucket, index, state_dict[name])
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


def _wrong_shape(name: str, shapes: tuple[Any, ...], value: object) -> Refusal:
    given = tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
    expected = tuple(map(tuple, shapes))
    what = f"{name}: expected shape {expected[0]}, found {given}."
    return given not in expected, StateDictError, what


def _wrong_value(managed: ManagedParameter, name: str, value: Any) -> Iterable[Refusal]:
    """Of a parameter: another shape, or rows that are not this rank's."""
    sharded = managed.weight
    yield _wrong_shape(name, (managed.part.whole_shape, sharded.shape), value)
    if isinstance(value, DTensor) and not _is_on_tensor_axis_alone(managed, value):
        was_written = id(value) == id(sharded) and cut_of(value) is not None and managed.was_changed
        yield was_written, StateDictError, _WRITTEN_ELSEWHERE.format(name=name)
        rows = tuple(value.to_local().shape)
        fits = is_cut_alike(value, sharded) or is_cut_by_torch(value)
        yield not fits, StateDictError, _LIES_ELSEWHERE.format(name=name, found=rows)


def _is_on_tensor_axis_alone(managed: ManagedParameter, value: DTensor) -> bool:
    """Whether `value` is placed as the module was before sharding."""
    return managed.part.placement is not None and value.placements == (managed.part.placement,)


def _load_parameter(bucket: Bucket, index: int, value: torch.Tensor) -> None:
    managed = bucket.parameters[index]
    if not isinstance(value, DTensor):
        local = own_rows(value, managed.sharded)
    elif _is_on_tensor_axis_alone(managed, value):
        bucket.load_part(index, value.to_local())
        return
    elif is_cut_alike(value, managed.weight):
        local = value.to_local()
    else:
        name_tensor(value, f"what is loaded into {managed.names[0]}")
        local = own_rows(gather_full(value), managed.sharded)
    target = bucket.main_part(index)
    if target.data_ptr() != local.data_ptr() or target.dtype != local.dtype:
        target.copy_(local)
