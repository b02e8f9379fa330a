"""Which samples a rank consumes: the global batch of a step never depends on how it is split.

Step t (from 0) consumes samples [t * G, (t + 1) * G) for a global batch of G. Rank r of N takes the
r-th of N equal runs of it, microbatch by microbatch; an engine on one rank (`single`) takes all.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from bench.data.source import TokenSource, build_source
from bench.spec import ResolvedRun


class Batches:
    """One rank's microbatches, built when asked for."""

    def __init__(
        self,
        source: TokenSource,
        *,
        global_batch: int,
        micro_batch: int,
        rank: int,
        ranks: int,
        device: torch.device,
    ) -> None:
        if global_batch % (ranks * micro_batch):
            raise ValueError(
                f"global batch {global_batch} is not ranks {ranks} x micro batch {micro_batch} x n"
            )
        self._source = source
        self._global_batch = global_batch
        self._micro_batch = micro_batch
        self._first = rank * (global_batch // ranks)
        self._device = device

    def microbatch(self, step: int, index: int) -> tuple[Tensor, Tensor]:
        """Tokens and targets, int64 [micro_batch, seq_len] on the device. Both count from 0."""
        first = step * self._global_batch + self._first + index * self._micro_batch
        rows = [self._source.sample(first + row) for row in range(self._micro_batch)]
        both = torch.from_numpy(np.stack(rows))
        if self._device.type == "cuda":
            both = both.pin_memory().to(self._device, non_blocking=True)
        return both[:, :-1].contiguous(), both[:, 1:].contiguous()


def build_batches(resolved: ResolvedRun, rank: int, device: torch.device) -> Batches:
    """The batches of one data-parallel rank. Raises UsageError where the text cannot serve."""
    source = build_source(resolved.data, vocab=resolved.shape.vocab, seq_len=resolved.train.seq_len)
    return Batches(
        source,
        global_batch=resolved.train.global_batch,
        micro_batch=resolved.train.micro_batch,
        rank=rank,
        ranks=resolved.data_parallel,
        device=device,
    )
