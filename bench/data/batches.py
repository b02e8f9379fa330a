"""Which samples a rank consumes: the global batch of a step never depends on how it is split.

Step t (from 0) consumes samples [t * G, (t + 1) * G) for a global batch of G. Rank r of N takes the
r-th of N equal runs of it, microbatch by microbatch; an engine on one rank (`single`) takes all.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from bench.data.source import TokenSource, build_source
from bench.errors import ConfigError
from bench.models.factory import MakeBatch
from bench.spec import ResolvedRun


class Batches:
    """One rank's microbatches, built when needed, or by `prepare` before that."""

    def __init__(
        self,
        make_batch: MakeBatch,
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
        self._make_batch = make_batch
        self._global_batch = global_batch
        self._micro_batch = micro_batch
        self._first = rank * (global_batch // ranks)
        self._device = device
        self._prepared: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    def prepare(self, step: int, count: int) -> None:
        """Make the `count` microbatches of a step on the host, while a device computes.

        Nothing on a CPU, which would have to wait for them all the same.
        """
        if self._device.type != "cpu":
            made = {(step, index): self._made(step, index) for index in range(count)}
            self._prepared = made

    def microbatch(self, step: int, index: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets of `micro_batch` rows on the device. Step and index count from 0."""
        key = (step, index)
        made = self._prepared.pop(key) if key in self._prepared else self._made(step, index)
        inputs, targets = made
        to = partial(Tensor.to, device=self._device, non_blocking=True)
        return to(inputs), to(targets)

    def _made(self, step: int, index: int) -> tuple[Tensor, Tensor]:
        """On the host, from where a device fetches them by itself."""
        first = step * self._global_batch + self._first + index * self._micro_batch
        inputs, targets = self._make_batch(range(first, first + self._micro_batch))
        if self._device.type == "cuda":
            return inputs.pin_memory(), targets.pin_memory()
        return inputs, targets


def token_batches(source: TokenSource) -> MakeBatch:
    """Inputs and targets, int64 [rows, seq_len], out of the samples of `source`."""

    def make(samples: Sequence[int]) -> tuple[Tensor, Tensor]:
        both = torch.from_numpy(np.stack([source.sample(number) for number in samples]))
        return both[:, :-1].contiguous(), both[:, 1:].contiguous()

    return make


def build_batches(
    resolved: ResolvedRun, rank: int, device: torch.device, make_batch: MakeBatch | None = None
) -> Batches:
    """The batches of one data-parallel rank.

    Args:
        resolved: the run.
        rank: of the run. Ranks of a tensor-parallel group, which are neighbours, get the same.
        device: where the batches are wanted.
        make_batch: that of a user's model; without it, tokens as `resolved.data` says.

    Raises:
        UsageError: the text cannot serve.
    """
    if make_batch is None:
        if resolved.shape is None:
            raise ConfigError("model.factory: a user's model needs its own make_batch")
        vocab, seq_len = resolved.shape.vocab, resolved.train.seq_len
        make_batch = token_batches(build_source(resolved.data, vocab=vocab, seq_len=seq_len))
    return Batches(
        make_batch,
        global_batch=resolved.train.global_batch,
        micro_batch=resolved.train.micro_batch,
        rank=rank // resolved.engine.tensor_parallel,
        ranks=resolved.data_parallel,
        device=device,
    )
