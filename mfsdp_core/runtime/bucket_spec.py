"""What the weights, the gradients and the parameters of one bucket all need to know."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch

from mfsdp_core.comm.torch_backend import dtype_name
from mfsdp_core.plan.buffers import BucketBuffers, plan_buffers
from mfsdp_core.plan.coordinate import Coordinate
from mfsdp_core.plan.dtype_policy import GroupDtypes
from mfsdp_core.plan.grouping import BucketPlan
from mfsdp_core.plan.layout import Layout
from mfsdp_core.plan.payload import Payload
from mfsdp_core.plan.strategy import Strategy
from mfsdp_core.precision.codec import BucketCodec, Shard


@dataclass(frozen=True)
class BucketSpec:
    """A planned bucket, its placements along both axes, this rank's coordinate, and its dtypes.

    dense_ranks: number of ranks that gradients are divided by, see [Note: divisor]. payloads: what
    gathers send, in their order, as far as is known before. codec: makes that of its weights.
    decoupled: gradients are handed over in their own dtype. pooled: the model has a pool.
    """

    plan: BucketPlan
    strategy: Strategy
    coordinate: Coordinate
    dtypes: GroupDtypes[torch.dtype]
    dense_ranks: int
    payloads: tuple[Payload, ...]
    codec: Callable[[Shard], BucketCodec]
    decoupled: bool
    pooled: bool

    @cached_property
    def buffers(self) -> BucketBuffers:
        """The bucket's rows of the one table of memory."""
        return plan_buffers(
            self.plan,
            self.strategy,
            self.coordinate,
            GroupDtypes(*map(dtype_name, vars(self.dtypes).values())),
            self.payloads,
            decoupled=self.decoupled,
            pooled=self.pooled,
        )

    @property
    def name(self) -> str:
        """Name in events and messages."""
        return self.plan.name

    @property
    def layout(self) -> Layout:
        """Where each parameter lies."""
        return self.plan.layout
