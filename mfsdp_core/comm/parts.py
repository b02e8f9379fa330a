"""A flat buffer whose contents lie in several tensors, to be reduced from where they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch


@dataclass(frozen=True)
class Parts:
    """What a rank adds to a reduction.

    tensors: contiguous, of one dtype. offsets: the element of the buffer at which each begins.
    elements: of the whole buffer; what no tensor covers is neither read nor written. scale: what
    every element is multiplied by before it is added up, in its own dtype. is_scaled: the tensors
    hold products already; other ranks' need not.
    """

    tensors: Sequence[torch.Tensor]
    offsets: tuple[int, ...]
    elements: int
    scale: float = 1.0
    is_scaled: bool = True

    @classmethod
    def of(cls, full: torch.Tensor) -> Parts:
        """A flat buffer that is one tensor."""
        return cls((full,), (0,), full.numel())

    @property
    def dtype(self) -> torch.dtype:
        """Of all tensors."""
        return self.tensors[0].dtype

    def table(self) -> torch.Tensor:
        """What other ranks must know: whether products lie there, and where. int64, on the CPU."""
        rows = [self.is_scaled, *(tensor.data_ptr() for tensor in self.tensors)]
        return torch.tensor(rows, dtype=torch.int64, device="cpu")

    def stretches(self, start: int, end: int, longest: int) -> tuple[Stretch, ...]:
        """Elements [start, end) of the buffer, in stretches of at most `longest` elements."""
        sizes = tuple(tensor.numel() for tensor in self.tensors)
        return _stretches(self.offsets, sizes, start, end, longest)


class Stretch(NamedTuple):
    """Elements [first, last) of a tensor, and where they begin in the range that was asked for."""

    tensor: int
    first: int
    last: int
    target: int


@cache
def _stretches(
    offsets: tuple[int, ...], sizes: tuple[int, ...], start: int, end: int, longest: int
) -> tuple[Stretch, ...]:
    found = []
    for index, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
        low, high = max(offset, start), min(offset + size, end)
        for first in range(low, high, longest):
            last = min(first + longest, high)
            found.append(Stretch(index, first - offset, last - offset, first - start))
    return tuple(found)
