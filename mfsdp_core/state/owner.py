"""From a sharded parameter to its model, to what its optimizer reads, and to its state."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch

#: Attribute of a sharded parameter: a weak reference to its `MegatronFSDP`.
OWNER = "_mfsdp_owner"


def owner_references(parameters: Iterable[torch.Tensor]) -> list[weakref.ref[Any]]:
    """Weak references to the models that own `parameters`, each once, in order."""
    references: dict[int, weakref.ref[Any]] = {}
    for parameter in parameters:
        reference = getattr(parameter, OWNER, None)
        if reference is not None and reference() is not None:
            references.setdefault(id(reference()), reference)
    return list(references.values())


def owners_of(parameters: Iterable[torch.Tensor]) -> list[Any]:
    """The models that own `parameters`, as far as they are alive."""
    return [owner for ref in owner_references(parameters) if (owner := ref()) is not None]


def optimizer_gradient(parameter: torch.Tensor) -> torch.Tensor | None:
    """What the optimizer reads: `decoupled_grad` where one is attached, else `grad`."""
    decoupled: torch.Tensor | None = getattr(parameter, "decoupled_grad", None)
    return parameter.grad if decoupled is None else decoupled


def numbered(
    optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]
) -> list[tuple[Any, torch.Tensor]]:
    """The number that a state dict has for each parameter; [] where it is of other parameters."""
    numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return list(zip(numbers, parameters, strict=True)) if len(numbers) == len(parameters) else []
