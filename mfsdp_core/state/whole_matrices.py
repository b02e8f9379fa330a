"""Optimizers that look at more than one element at a time, which a shard cannot serve.

Row and column statistics, orthogonalised updates and inner products over all parameters need whole
tensors. Over a rank's rows they would be wrong, and torch's DTensor computes some of them as if
shards were even. torch's own are refused by name, before anything is sharded or sent. Those of
others are watched in their first steps, since watching costs microseconds per operation: what moves
rows between ranks is refused. Sums over shards, such as norms, are right and pass.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from mfsdp_core.errors import ConfigurationError

_CHOICES = (
    "Use an optimizer that treats each element by itself (AdamW, SGD and their kin), or "
    "zero_dp_strategy=0, where every rank has whole tensors."
)
#: torch's own optimizers that need whole tensors, with what they compute from them.
_NEEDS = {
    "Adafactor": "averages over rows and columns of each matrix",
    "Muon": "orthogonalises each matrix",
    "SparseAdam": "reads sparse gradients, and reduced gradients are dense",
}


def refuse_whole_matrices(optimizer: torch.optim.Optimizer, *, sharded: bool) -> None:
    """Refuse `optimizer` if it cannot work on the parameters that sharding leaves to a rank.

    sharded: whether a rank is left with less than whole tensors.

    Raises:
        ConfigurationError: it is one of torch's that need more, or is derived from one.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ConfigurationError(
            f"{_name(optimizer)} takes inner products over all parameters at once and evaluates "
            "the model within a step, which sharded parameters cannot serve. Use an optimizer "
            "that treats each element by itself (AdamW, SGD and their kin)."
        )
    for name, need in _NEEDS.items():
        known: Any = getattr(torch.optim, name, None)  # Muon is younger than the oldest torch
        if known is not None and isinstance(optimizer, known):
            if sharded:
                raise ConfigurationError(
                    f"{_name(optimizer)} {need}, and a rank has only some rows. {_CHOICES}"
                )
            if name == "SparseAdam":
                raise ConfigurationError(f"{_name(optimizer)} {need}. Use Adam.")


class NoRowsMoved(TorchDispatchMode):
    """While it is active, an operation of DTensors that sends rows to other ranks raises.

    torch would take them for even shards: see [Note: uneven shards].
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__()
        self._name = _name(optimizer)
        self._paused = False

    @contextmanager
    def paused(self) -> Iterator[None]:
        """A model may run in here."""
        self._paused = True
        try:
            yield
        finally:
            self._paused = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Raises ConfigurationError; else does what was asked for."""
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # comes back as what it does with local tensors
        is_collective = func.namespace in {"c10d", "_c10d_functional"}
        if is_collective and not self._paused and _moves_rows(func, args):
            raise ConfigurationError(
                f"{self._name} looks at whole matrices ({func.overloadpacket.__name__} in its "
                f"step), and a rank has only some rows. {_CHOICES}"
            )
        return func(*args, **(kwargs or {}))


def _moves_rows(func: Any, args: Any) -> bool:
    operation: str = func.overloadpacket.__name__
    if operation.startswith("all_reduce"):
        return "avg" in args  # a mean of means, which is not that of uneven shards
    moving = ("all_gather", "allgather", "_allgather", "reduce_scatter", "all_to_all", "broadcast")
    return operation.startswith(moving)


def are_whole(parameters: Iterable[torch.Tensor]) -> bool:
    """Whether this rank has all of every one of `parameters`."""
    return all(
        all(placement.is_replicate() for placement in parameter.placements)
        for parameter in parameters
        if isinstance(parameter, DTensor)
    )


def _name(optimizer: torch.optim.Optimizer) -> str:
    return type(optimizer).__name__
