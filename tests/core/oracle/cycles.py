"""Drives models that are no toys (`oracle.sharded` drives those), and reads their shards."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from mfsdp_core import gather_full
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


def gathered(shards: Mapping[str, Any]) -> Named:
    """By the core's own gather."""
    return {key: gather_full(shard) for key, shard in shards.items()}
