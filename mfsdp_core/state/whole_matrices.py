"""Optimizers that look at more than one element at a time, which a shard cannot serve.

Row and column statistics, orthogonalised updates and inner products over all parameters need whole
tensors. torch's own optimizers of that kind are refused by name, before anything is sharded or
sent. Those of others compute with shards, which is right or refused: see [Note: computing with
uneven shards].
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.distributed.tensor import DTensor

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


def are_whole(parameters: Iterable[torch.Tensor]) -> bool:
    """Whether this rank has all of every one of `parameters`."""
    return all(
        all(placement.is_replicate() for placement in parameter.placements)
        for parameter in parameters
        if isinstance(parameter, DTensor)
    )


def _name(optimizer: torch.optim.Optimizer) -> str:
    return type(optimizer).__name__
