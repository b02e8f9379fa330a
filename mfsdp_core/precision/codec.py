"""How the weights of a bucket travel: what a gather sends, and what modules compute with.

    main weights --encode--> this rank's part of each payload --gather--> payloads --decode-->
    compute weights

A codec is a recipe for a model. It says which parameters it takes and what their payloads are
(`mfsdp_core.plan.payload`: sizes, dtypes, and the passes that read each of them), and makes one
`BucketCodec` per bucket, which may keep state such as scales. Pass one as
`MixedPrecisionPolicy(weight_codec=...)`. Parameters that it does not take travel as they are: their
buckets have the codec `Plain`.

Rules for a codec of one's own
- Every rank calls `encode` of the same buckets in the same order, once when a bucket is sharded and
  then once per `optimizer.step` (or load), also where its part holds no parameter. All it may
  exchange with other ranks goes through `Shard.reduce_max`.
- Parts are whole dim-0 rows, perhaps none (`Layout.rows_in`); padding may hold anything.
- Equal main weights must give equal payloads on all ranks, whatever the number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from mfsdp_core.plan.layout import Layout
from mfsdp_core.plan.payload import WEIGHTS, PayloadPlan
from mfsdp_core.plan.prefetch import Direction


@dataclass(frozen=True)
class Shard:
    """The part of a bucket whose main weights this rank holds.

    compute: dtype in which modules compute. first_slice, slices: of the layout. reduce_max:
    replaces a tensor by its maximum over the ranks that hold the other parts; collective, and
    nothing where one rank holds all.
    """

    layout: Layout
    compute: torch.dtype
    first_slice: int
    slices: int
    reduce_max: Callable[[torch.Tensor], None]


class BucketCodec(Protocol):
    """Encodes and decodes one bucket. All tensors are flat and on the bucket's device."""

    def encode(self, main: torch.Tensor, parts: dict[str, torch.Tensor]) -> None:
        """Write this rank's part of every payload.

        main: [slices * layout.slice_elements] in the dtype of the main weights. parts: by name of
        the payload, [slices * payload.slice_elements] each.
        """

    def decode(
        self, direction: Direction, gathered: Mapping[str, torch.Tensor], weights: torch.Tensor
    ) -> None:
        """Fill `weights`, the whole bucket in the compute dtype, for a pass in one direction.

        gathered: the payloads of that direction, [layout.slices * payload.slice_elements] each.
        """

    def forget(self) -> None:
        """Drop what earlier weights have left: others are loaded, or come from another rank."""


class Codec(PayloadPlan, Protocol):
    """A recipe: what it takes, what travels, and how."""

    def for_bucket(self, shard: Shard) -> BucketCodec:
        """The codec of one bucket on this rank."""


class Plain:
    """Weights travel as they are: the same storage, or a cast from the main weights.

    `parts` may be a view of `main`'s own storage (see [Note: one copy] of
    `runtime/weight_buffers.py`): then nothing is left to do.
    """

    def encode(self, main: torch.Tensor, parts: Mapping[str, torch.Tensor]) -> None:
        """Identity where they are one copy, else a cast, or a copy out of host memory."""
        part = parts[WEIGHTS]
        if part is not main:
            if part.dtype != main.dtype:  # cast by the device, not by the host
                main = main.to(part.device, non_blocking=True)
            part.copy_(main, non_blocking=True)

    def decode(
        self, direction: Direction, gathered: Mapping[str, torch.Tensor], weights: torch.Tensor
    ) -> None:
        """Nothing: they were gathered to where modules look for them."""

    def forget(self) -> None:
        """Nothing: it keeps nothing."""
