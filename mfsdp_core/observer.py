"""Who is told what happens on streams: checkers of order, checkers of replays, annotations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

#: Names of streams.
CURRENT = "compute"
COPY_IN = "copy-in"
Tensors = Sequence[Tensor]


class Observer:
    """Somebody who writes down what happens on streams; this one does not.

    Numbers are of what can be waited for. is_in_backend: what is computed now is a collective's
    own, as gloo's copies of its results, and of no stream here.
    """

    is_in_backend = False

    def issued(
        self,
        name: str,
        group: object,
        reads: Tensors,
        writes: Tensors,
    ) -> int:
        """A collective starts, behind what the current stream has; its number."""
        del name, group, reads, writes
        return 0

    def recorded(self, name: str) -> int:
        """All that the current stream has; its number."""
        del name
        return 0

    def switched(self, stream: str) -> None:
        """The current stream is `CURRENT` or `COPY_IN` from here on."""

    def followed(self) -> None:
        """What the copy-in stream gets from here on is behind all that the current one has."""

    def waiting(self, number: int) -> None:
        """The backend is asked to wait for it; what it does until `waited` is its own affair."""
        del number
        self.is_in_backend = True

    def waited(self, number: int) -> None:
        """The current stream waits for it."""
        del number
        self.is_in_backend = False

    def resized(self, memory: Tensor, *, stays: bool) -> None:
        """A tensor that had lost its memory has some again. stays: in a step that is repeated."""

    def released(self, memory: Tensor, name: object) -> None:
        """Memory may be used again, by anybody, from here on."""


class Span(NamedTuple):
    """Addresses from `start` to before `end`, in bytes."""

    start: int
    end: int


def span_of(tensor: Tensor) -> Span:
    """Addresses from the first to the last element; empty where there is no memory."""
    if isinstance(tensor, DTensor):
        tensor = tensor._local_tensor
    if tensor.layout != torch.strided or tensor.device.type == "meta" or not tensor.numel():
        return Span(0, 0)
    start = tensor.data_ptr()
    last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return Span(start, start + (last + 1) * tensor.element_size() if start else 0)
