"""Loading a model's state dict into sharded main weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from mfsdp_core.errors import StateDictError
from mfsdp_core.runtime.parameter_group import ParameterGroup

#: What the wrapper puts before every name.
PREFIX = "module."


def load_model_state(
    model: nn.Module,
    groups: list[ParameterGroup],
    state_dict: Mapping[str, Any],
    *,
    strict: bool,
) -> Any:
    """Write parameters into the main weights and buffers into their modules.

    Values are whole tensors, or DTensors sharded as the model is. The caller installs the weights.
    A tied parameter is loaded from whichever of its names is present.

    Raises:
        StateDictError: see `MegatronFSDP.load_state_dict`.
    """
    taken: set[str] = set()
    missing: list[str] = []
    for group in groups:
        for index, managed in enumerate(group.parameters):
            names = [PREFIX + name for name in managed.names]
            present = [name for name in names if name in state_dict]
            taken.update(present)
            if not present:
                missing.append(names[0])
                continue
            _load_one(group, index, present[0], state_dict[present[0]])
    rest = {name: value for name, value in state_dict.items() if name not in taken}
    parameters = {name for group in groups for p in group.parameters for name in p.names}
    result = nn.Module.load_state_dict(model, rest, strict=False)
    missing += [n for n in result.missing_keys if n.removeprefix(PREFIX) not in parameters]
    unexpected = list(result.unexpected_keys)
    if strict and (missing or unexpected):
        raise StateDictError(
            f"the state dict does not fit the model. Missing: {missing or 'none'}. Unexpected: "
            f"{unexpected or 'none'}. Names start with {PREFIX!r}; strict=False loads a part."
        )
    return type(result)(missing, unexpected)


def _load_one(group: ParameterGroup, index: int, name: str, value: torch.Tensor) -> None:
    managed = group.parameters[index]
    sharded, shape = managed.sharded, managed.part.whole_shape
    if tuple(value.shape) not in (shape, tuple(sharded.shape)):
        raise StateDictError(f"{name}: expected shape {shape}, found {tuple(value.shape)}.")
    if not isinstance(value, DTensor):
        group.load(index, value)
        return
    if managed.part.placement is not None and value.placements == (managed.part.placement,):
        # As the module was before sharding: on the tensor-parallel axis alone.
        group.load_part(index, value.to_local())
        return
    local, own = value.to_local(), sharded.detach()
    if not isinstance(own, DTensor) or local.shape != own.to_local().shape:
        raise StateDictError(
            f"{name}: its shard has shape {tuple(local.shape)}, this model's has another. Load "
            "whole tensors (gather_full), or save and load under the same sharding."
        )
    own.to_local().copy_(local)
