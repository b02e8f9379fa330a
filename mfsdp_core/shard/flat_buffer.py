"""A layout with storage behind it, and the matrices in a part of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

import torch

from mfsdp_core.plan.layout import Layout


def part(data: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    """View of the `rank`-th of `size` equal parts of a flat buffer."""
    elements = data.numel() // size
    return data[rank * elements : (rank + 1) * elements]


#: Numbers as tensors of one element, by value and dtype.
Factors = dict[tuple[float, torch.dtype], torch.Tensor]


def copy_scaled(target: torch.Tensor, values: torch.Tensor, scale: float, factors: Factors) -> None:
    """Fill `target` with `values` times `scale` in one pass; multiplied in the wider dtype."""
    if scale == 1.0:
        target.copy_(values)
        return
    wide = torch.promote_types(values.dtype, target.dtype)
    if wide == values.dtype:
        torch.mul(values, scale, out=target)
        return
    if (scale, wide) not in factors:
        factors[scale, wide] = target.new_full((1,), scale, dtype=wide)
    torch.mul(values, factors[scale, wide], out=target)


@dataclass(frozen=True, slots=True)
class FullBuffer:
    """All slices. data: [layout.total_elements]."""

    layout: Layout
    data: torch.Tensor

    def tensor(self, index: int) -> torch.Tensor:
        """View of tensor `index` in its own shape."""
        slot, data = self.layout.slots[index], self.data
        # One operation of torch where a slice and its shape are two.
        return data.as_strided(slot.shape, slot.strides, data.storage_offset() + slot.offset)

    def zero_gaps(self) -> None:
        """Zero what belongs to no tensor."""
        for start, end in self.layout.gaps:
            self.data[start:end].zero_()


@dataclass(frozen=True)
class MatrixRows:
    """The rows of matrix `index` in a range of slices. where: in a flat tensor of that range."""

    index: int
    first_row: int
    columns: int
    where: slice

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        """View [rows, columns]."""
        return flat[self.where].view(-1, self.columns)


def matrix_rows(layout: Layout, first_slice: int, slices: int) -> Iterator[MatrixRows]:
    """What a range of slices holds of every matrix, those that it holds nothing of left out."""
    low, high = first_slice * layout.slice_elements, (first_slice + slices) * layout.slice_elements
    for index, slot in enumerate(layout.slots):
        start, end = max(slot.offset, low), min(slot.end, high)
        if start < end:
            columns = prod(slot.shape[1:])
            first_row = (start - slot.offset) // columns
            yield MatrixRows(index, first_row, columns, slice(start - low, end - low))
