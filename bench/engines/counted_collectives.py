"""torch's own collectives of fully_shard, with their bytes counted.

fully_shard takes the objects that communicate from outside; these are its defaults, which live in
a private module of torch, plus a counter.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp._fully_shard._fsdp_collectives import (
    DefaultAllGather,
    DefaultReduceScatter,
)

from bench.engines.ring_bytes import RingBytes


class CountedAllGather(DefaultAllGather):
    """Counts each gather into `ring`. largest_bytes: of full buffers."""

    def __init__(self, ring: RingBytes) -> None:
        self._ring = ring
        self.largest_bytes = 0

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Count, then gather."""
        self._ring.gather(output_tensor.nbytes, output_tensor.dtype, group.size())
        self.largest_bytes = max(self.largest_bytes, output_tensor.nbytes)
        work: dist.Work | None = super().__call__(output_tensor, input_tensor, group, async_op)
        return work


class CountedReduceScatter(DefaultReduceScatter):
    """Counts each reduction; `largest_bytes` is the largest input and output together.

    replicas: over which fully_shard then sums up the output, by an operation of its own.
    """

    def __init__(self, ring: RingBytes, replicas: int) -> None:
        self._ring = ring
        self._replicas = replicas
        self.largest_bytes = 0

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work:
        """Count, then reduce."""
        self._ring.reduce_scatter(input_tensor.nbytes, group.size())
        self._ring.all_reduce(output_tensor.nbytes, self._replicas)
        both_bytes = input_tensor.nbytes + output_tensor.nbytes
        self.largest_bytes = max(self.largest_bytes, both_bytes)
        return super().__call__(output_tensor, input_tensor, group, op, async_op)
