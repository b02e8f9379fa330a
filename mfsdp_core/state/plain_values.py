"""Values beside the weights (options, counters, schedules) as JSON, their tensors apart.

A checkpoint must be readable without running code that came with it, so nothing is pickled. JSON
has neither tuples nor keys that are numbers; both are spelled as an object with one `$` key:

    (1, 2)      {"$tuple": [1, 2]}          {3: "x"}    {"$items": [[3, "x"]]}
    a tensor    {"$tensor": "its key"}
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from mfsdp_core.errors import CheckpointError

Json = Any


def pack(value: object, tensors: dict[str, torch.Tensor], path: str) -> Json:
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
        items = [pack(item, tensors, f"{path}/{i}") for i, item in enumerate(value)]
        return items if isinstance(value, list) else {"$tuple": items}
    if isinstance(value, Mapping):
        packed = {key: pack(item, tensors, f"{path}/{key}") for key, item in value.items()}
        if all(isinstance(key, str) and not key.startswith("$") for key in packed):
            return packed
        if all(isinstance(key, str | int) for key in packed):
            return {"$items": [[key, item] for key, item in packed.items()]}
    raise CheckpointError(
        f"{path}: cannot store a {type(value).__name__} without pickling it. Store numbers, "
        "strings, None, whole tensors, and lists, tuples and dicts of them (keys: str or int)."
    )


def unpack(packed: Json, tensors: Mapping[str, torch.Tensor]) -> Any:
    """What `pack` was given.

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
