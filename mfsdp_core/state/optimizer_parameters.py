"""Parameters of an optimizer: whose they are, what it reads of them, what stands in for them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.tensor import DTensor

#: Attribute of a sharded parameter: a weak reference to its `MegatronFSDP`.
OWNER = "_mfsdp_owner"

#: Optimizers whose update of an element depends on nothing but that element's own history.
ELEMENTWISE: frozenset[type[torch.optim.Optimizer]] = frozenset(
    {
        torch.optim.ASGD,
        torch.optim.Adadelta,
        torch.optim.Adagrad,
        torch.optim.Adam,
        torch.optim.AdamW,
        torch.optim.Adamax,
        torch.optim.NAdam,
        torch.optim.RAdam,
        torch.optim.RMSprop,
        torch.optim.Rprop,
        torch.optim.SGD,
    }
)


class Owners:
    """The models that own `parameters`, each once, in order, as long as they are alive."""

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        references = (getattr(parameter, OWNER, None) for parameter in parameters)
        self._references: dict[int, weakref.ref[Any]] = {
            id(owner): reference
            for reference in references
            if reference is not None and (owner := reference()) is not None
        }

    def __iter__(self) -> Iterator[Any]:
        owners = [reference() for reference in self._references.values()]
        return iter([owner for owner in owners if owner is not None])


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Of all groups, in order."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def optimizer_gradient(parameter: torch.Tensor) -> torch.Tensor | None:
    """What the optimizer reads: `decoupled_grad` where one is attached, else `grad`."""
    decoupled: torch.Tensor | None = getattr(parameter, "decoupled_grad", None)
    return parameter.grad if decoupled is None else decoupled


def are_whole(parameters: Iterable[torch.Tensor]) -> bool:
    """Whether this rank has all of every one of `parameters`."""
    return all(
        all(placement.is_replicate() for placement in parameter.placements)
        for parameter in parameters
        if isinstance(parameter, DTensor)
    )


@contextmanager
def standing_in(
    optimizer: torch.optim.Optimizer, seen: Callable[[dict[str, Any]], list[torch.Tensor]]
) -> Iterator[None]:
    """Let `optimizer` see other parameters within the block: of each group what `seen` says."""
    groups = optimizer.param_groups
    kept = [group["params"] for group in groups]
    try:
        for group in groups:
            group["params"] = seen(group)
        yield
    finally:
        for group, params in zip(groups, kept, strict=True):
            group["params"] = params


def numbered(
    optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]
) -> list[tuple[Any, torch.Tensor]]:
    """The number that a state dict has for each parameter; [] where it is of other parameters."""
    numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
    parameters = parameters_of(optimizer)
    return list(zip(numbers, parameters, strict=True)) if len(numbers) == len(parameters) else []
