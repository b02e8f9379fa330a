"""Drives models that are no toys (`oracle.sharded` drives those), and reads their shards."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from oracle.ranks import WORLD
from oracle.reference import Named


def run_cycle(model: Any, loss: Callable[[Tensor], Tensor], microbatches: Sequence[Tensor]) -> None:
    """All microbatches of this rank up to the finished gradient; all but the last in `no_sync`."""
    for number, inputs in enumerate(microbatches, start=1):
        value = loss(model(inputs))
        if number < len(microbatches):
            with model.no_sync():
                value.backward()
        else:
            value.backward()
    model.finish_grad_sync()


def named(model: Any) -> list[tuple[str, Any]]:
    """Optimizer parameters under the names that the bare module gives them."""
    return [(key.removeprefix("module."), p) for key, p in model.named_parameters()]


def pieces_by_rank(shards: Mapping[str, Any]) -> list[Named]:
    """What every rank of the world holds of `shards`, DTensors; not the core's own gather."""
    pieces: list[Any] = [None] * WORLD
    dist.all_gather_object(pieces, {key: shard.to_local() for key, shard in shards.items()})
    return pieces
