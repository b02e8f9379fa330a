"""What the weights, the gradients and the group of one bucket all need to know."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mfsdp_core.plan.coordinate import Coordinate
from mfsdp_core.plan.dtype_policy import GroupDtypes
from mfsdp_core.plan.grouping import BucketPlan
from mfsdp_core.plan.layout import Layout
from mfsdp_core.plan.strategy import Strategy


@dataclass(frozen=True, slots=True)
class BucketSpec:
    """A planned bucket, its placements along both axes, this rank's coordinate, and its dtypes.

    dense_ranks: number of ranks that gradients are divided by, see [Note: divisor].
    """

    plan: BucketPlan
    strategy: Strategy
    coordinate: Coordinate
    dtypes: GroupDtypes[torch.dtype]
    dense_ranks: int

    @property
    def name(self) -> str:
        """Name in events and messages."""
        return self.plan.name

    @property
    def layout(self) -> Layout:
        """Where each parameter lies."""
        return self.plan.layout
