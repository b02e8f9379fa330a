"""From a sharded parameter to the model it belongs to, and to what its optimizer reads."""

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
