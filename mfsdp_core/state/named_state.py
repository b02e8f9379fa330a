"""Model and optimizer state under names that do not depend on how the model is sharded.

    model/NAME               parameters, each tied one once, and buffers; names of the bare module
    optimizer/NAME/KEY       optimizer state of parameter NAME, sharded as the parameter is
    values/...               tensors within options, counters and what the caller adds

A scalar that is not sharded is given as one row, as sharded ones are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from mfsdp_core.errors import CheckpointError, ConfigurationError
from mfsdp_core.shard.chunk import describe_chunk, offsets_of
from mfsdp_core.shard.dtensor import as_dtensor
from mfsdp_core.state.described import describe_like
from mfsdp_core.state.model_state import PREFIX
from mfsdp_core.state.plain_values import Json, pack
from mfsdp_core.state.whole_matrices import show_shards

MODEL, OPTIMIZER, VALUES = "model/", "optimizer/", "values/"


@dataclass
class NamedState:
    """Tensors for torch.distributed.checkpoint, and the rest as JSON, by section."""

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    values: dict[str, Json] = field(default_factory=dict)

    def add_values(self, section: str, value: object) -> None:
        """Put `value` under `section`.

        Raises:
            CheckpointError: it cannot be stored.
        """
        self.values[section] = pack(value, self.tensors, f"{VALUES}{section}")


def parameter_names(model: nn.Module) -> dict[torch.Tensor, str]:
    """The first name of each parameter, as the bare module has it."""
    return {p: name.removeprefix(PREFIX) for name, p in model.named_parameters()}


def add_model(state: NamedState, model: nn.Module) -> None:
    """Weights, sharing memory with the model, and buffers.

    Raises:
        CheckpointError: extra state of a module that cannot be stored.
    """
    repeated = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    repeated -= {name for name, _ in model.named_parameters()}
    extra: dict[str, object] = {}
    for full_name, value in sorted(model.state_dict().items()):
        name = full_name.removeprefix(PREFIX)
        if full_name in repeated:
            continue
        if isinstance(value, torch.Tensor):
            state.tensors[MODEL + name] = one_row(value)
        else:
            extra[name] = value
    state.add_values("extra_state", extra)


def add_optimizer(
    state: NamedState, optimizer: torch.optim.Optimizer, names: Mapping[torch.Tensor, str]
) -> None:
    """Optimizer state and options by parameter name.

    Raises:
        ConfigurationError: the optimizer has parameters that the model does not have.
        CheckpointError: state that cannot be stored.
    """
    show_shards(optimizer)
    state.add_values("groups", groups_by_name(optimizer, names))
    plain: dict[str, dict[str, object]] = {}
    for parameter, values in optimizer.state.items():
        name = names[parameter]
        for key, value in sorted(values.items()):
            if not isinstance(value, torch.Tensor):
                plain.setdefault(name, {})[key] = value
                continue
            if isinstance(value, DTensor) and value.shape != parameter.shape:
                raise CheckpointError(
                    f"optimizer state {key!r} of {name} has shape {tuple(value.shape)}, and the "
                    f"parameter {tuple(parameter.shape)}: state that is sharded in another way "
                    "than its parameter cannot be saved."
                )
            describe_like(value, parameter)
            state.tensors[f"{OPTIMIZER}{name}/{key}"] = one_row(value)
    state.add_values("plain_state", plain)


def groups_by_name(
    optimizer: torch.optim.Optimizer, names: Mapping[torch.Tensor, str]
) -> list[dict[str, Any]]:
    """Per parameter group, `names` of its parameters and its `options`.

    Raises:
        ConfigurationError: a parameter that the model does not have.
    """
    foreign = [p for g in optimizer.param_groups for p in g["params"] if p not in names]
    if foreign:
        raise ConfigurationError(
            f"{len(foreign)} parameters of the optimizer (the first of shape "
            f"{tuple(foreign[0].shape)}) are not the model's. Build the optimizer from "
            "model.parameters() after sharding, or use fully_shard."
        )
    return [
        {
            "names": [names[parameter] for parameter in group["params"]],
            "options": {key: value for key, value in group.items() if key != "params"},
        }
        for group in optimizer.param_groups
    ]


def one_row(value: torch.Tensor) -> torch.Tensor:
    """A replicated scalar of a model as one row, sharing memory; anything else as it is."""
    if not isinstance(value, DTensor) or value.ndim:
        return value
    row = as_dtensor(value.to_local().view(1), (1,), value.device_mesh, tuple(value.placements))
    describe_chunk(row, (0,))
    return row


def shaped_as(value: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """The reverse of `one_row` for a parameter of `shape`."""
    if shape or not isinstance(value, DTensor):
        return value
    return as_dtensor(value.to_local().view(()), (), value.device_mesh, tuple(value.placements))


def empty_like_parameter(parameter: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """New memory for state of `parameter`, sharded and described as it is."""
    empty = torch.zeros_like(parameter.detach(), dtype=dtype)
    offsets = offsets_of(parameter)
    if isinstance(empty, DTensor) and offsets is not None:
        describe_chunk(empty, offsets)
    return empty
