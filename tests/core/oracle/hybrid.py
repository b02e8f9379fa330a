"""Toy models sharded over two axes. Runs inside a rank; the world is cut into (outer, inner)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from mfsdp_core import MixedPrecisionPolicy, fully_shard_model
from oracle.models import TOYS, build
from oracle.ranks import WORLD, on_two_axes
from oracle.reference import Named
from oracle.sharded import STRATEGIES, Sharded

#: Every pair of inner and outer strategy that the placements can express.
PAIRS = [(inner, "no_shard") for inner in STRATEGIES] + [
    (inner, "optim") for inner in STRATEGIES[1:]
]


@dataclass
class Hybrid(Sharded):
    """Joins pieces in the order that the specification gives, without the core's own gather."""

    outer_size: int
    inner_shards: bool
    outer_shards: bool

    def _joined(self, shards: dict[str, Any]) -> Named:
        pieces: list[Any] = [None] * WORLD
        dist.all_gather_object(pieces, {key: shard.to_local() for key, shard in shards.items()})
        inner_size = WORLD // self.outer_size
        # Inner-major: the pieces of an inner slice lie on the outer ranks, one after another.
        order = [
            outer * inner_size + inner
            for inner in (range(inner_size) if self.inner_shards else [0])
            for outer in (range(self.outer_size) if self.outer_shards else [0])
        ]
        return {key: torch.cat([pieces[rank][key] for rank in order]) for key in shards}


def hybrid(
    inner: str,
    outer: str,
    outer_size: int = 2,
    dtype: torch.dtype = torch.float64,
    name: str = "aligned_stack",
    **arguments: Any,
) -> Hybrid:
    """The toy model `name`, sharded by `inner` and `outer` over `outer_size` outer ranks."""
    arguments.setdefault("mixed_precision_policy", MixedPrecisionPolicy(main_params_dtype=dtype))
    arguments.setdefault("sync_model_each_microbatch", False)
    model = fully_shard_model(
        build(name, dtype),
        fsdp_unit_modules=list(TOYS[name].units),
        zero_dp_strategy=inner,
        **on_two_axes(outer, outer_size),
        **arguments,
    )
    return Hybrid(name, WORLD, dtype, model, outer_size, inner != "no_shard", outer == "optim")
