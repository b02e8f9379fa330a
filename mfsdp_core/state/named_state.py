"""Model and optimizer state under names that do not depend on how the model is sharded.

    model/NAME               parameters, each tied one once, and buffers; names of the bare module
    optimizer/NAME/KEY       optimizer state of parameter NAME, sharded as the parameter is
    values/...               tensors within options, counters and what the caller adds

A scalar that is not sharded is given as one row, as sharded ones are. A checkpoint must be readable
without running code that came with it, so nothing is pickled: values besides the weights are JSON.
That has neither tuples nor keys that are numbers; both are an object with one `$` key:

    (1, 2)      {"$tuple": [1, 2]}          {3: "x"}    {"$items": [[3, "x"]]}
    a tensor    {"$tensor": "its key"}
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from mfsdp_core.errors import CheckpointError, ConfigurationError, StateDictError
from mfsdp_core.shard.chunk import describe_chunk, describe_like
from mfsdp_core.shard.dtensor import as_dtensor
from mfsdp_core.state.model_state import PREFIX, bare_values
from mfsdp_core.state.optimizer_parameters import parameters_of
from mfsdp_core.state.whole_matrices import show_shards

MODEL, OPTIMIZER, VALUES = "model/", "optimizer/", "values/"
Json = Any


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
        self.values[section] = _pack(value, self.tensors, f"{VALUES}{section}")

    def add_model(self, model: nn.Module) -> None:
        """Weights, sharing memory with the model, and buffers.

        Raises:
            CheckpointError: extra state of a module that cannot be stored.
        """
        extra: dict[str, object] = {}
        for name, value in sorted(bare_values(model)[0].items()):
            if isinstance(value, torch.Tensor):
                self.tensors[MODEL + name] = one_row(value)
            else:
                extra[name] = value
        self.add_values("extra_state", extra)

    def add_optimizer(
        self, optimizer: torch.optim.Optimizer, names: Mapping[torch.Tensor, str]
    ) -> None:
        """Optimizer state and options by parameter name.

        Raises:
            ConfigurationError: the optimizer has parameters that the model does not have.
            CheckpointError: state that cannot be stored.
        """
        show_shards(optimizer)
        self.add_values("groups", groups_by_name(optimizer, names))
        plain: dict[str, dict[str, object]] = {}
        for parameter, values in optimizer.state.items():
            name = names[parameter]
            for key, value in sorted(values.items()):
                if not isinstance(value, torch.Tensor):
                    plain.setdefault(name, {})[key] = value
                    continue
                if isinstance(value, DTensor) and value.shape != parameter.shape:
                    raise CheckpointError(
                        f"optimizer state {key!r} of {name} has shape {tuple(value.shape)}, and "
                        f"the parameter {tuple(parameter.shape)}: state that is sharded in another "
                        "way than its parameter cannot be saved."
                    )
                describe_like(value, parameter)
                self.tensors[f"{OPTIMIZER}{name}/{key}"] = one_row(value)
        self.add_values("plain_state", plain)


def parameter_names(model: nn.Module) -> dict[torch.Tensor, str]:
    """The first name of each parameter, as the bare module has it."""
    return {p: name.removeprefix(PREFIX) for name, p in model.named_parameters()}


def groups_by_name(
    optimizer: torch.optim.Optimizer, names: Mapping[torch.Tensor, str]
) -> list[dict[str, Any]]:
    """Per parameter group, `names` of its parameters and its `options`.

    Raises:
        ConfigurationError: a parameter that the model does not have.
    """
    foreign = [parameter for parameter in parameters_of(optimizer) if parameter not in names]
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
    """A replicated scalar of a model as one row, sharing memory; anything else unchanged."""
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


def compare_names(where: str, what: str, own: Iterable[str], stored: Iterable[str]) -> None:
    """Refuse other names. where: what is loaded; what: what it is loaded into.

    Raises:
        StateDictError: with the names that only one side has.
    """
    own, stored = set(own), set(stored)
    if own != stored:
        raise StateDictError(
            f"names differ in {where} and in {what}. Missing from {where}: "
            f"{sorted(own - stored) or 'none'}. Unexpected there: {sorted(stored - own) or 'none'}."
        )


def compare_shapes(where: str, name: str, own: Iterable[int], stored: Iterable[int]) -> None:
    """Refuse another shape.

    Raises:
        StateDictError: with both.
    """
    if tuple(own) != tuple(stored):
        raise StateDictError(f"{name}: the model has shape {tuple(own)}, {where} {tuple(stored)}.")


def _pack(value: object, tensors: dict[str, torch.Tensor], path: str) -> Json:
    """`value` as JSON; its tensors go to `tensors` under keys that start with `path`.

    Raises:
        CheckpointError: a type that JSON and the three forms above cannot express, with its path.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, torch.Tensor) and not isinstance(value, DTensor):
        tensors[path] = value.detach()
        return {"$tensor": path}
    if isinstance(value, list | tuple):
        items = [_pack(item, tensors, f"{path}/{i}") for i, item in enumerate(value)]
        return items if isinstance(value, list) else {"$tuple": items}
    if isinstance(value, Mapping):
        packed = {key: _pack(item, tensors, f"{path}/{key}") for key, item in value.items()}
        if all(isinstance(key, str) and not key.startswith("$") for key in packed):
            return packed
        if all(isinstance(key, str | int) for key in packed):
            return {"$items": [[key, item] for key, item in packed.items()]}
    raise CheckpointError(
        f"{path}: cannot store a {type(value).__name__} without pickling it. Store numbers, "
        "strings, None, whole tensors, and lists, tuples and dicts of them (keys: str or int)."
    )


def unpack(packed: Json, tensors: Mapping[str, torch.Tensor]) -> Any:
    """What was given to `add_values`.

    Raises:
        CheckpointError: a tensor is missing.
    """
    if isinstance(packed, list):
        return [unpack(item, tensors) for item in packed]
    if not isinstance(packed, dict):
        return packed
    if set(packed) == {"$tuple"}:
        return tuple(unpack(item, tensors) for item in packed["$tuple"])
    if set(packed) == {"$items"}:
        return {key: unpack(item, tensors) for key, item in packed["$items"]}
    if set(packed) == {"$tensor"}:
        if packed["$tensor"] not in tensors:
            raise CheckpointError(f"the checkpoint lacks the tensor {packed['$tensor']!r}.")
        return tensors[packed["$tensor"]]
    return {key: unpack(item, tensors) for key, item in packed.items()}
