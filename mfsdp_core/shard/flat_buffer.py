"""A layout with storage behind it: the whole buffer or one rank's slice."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mfsdp_core.plan.layout import Layout


def part(data: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    """View of the `rank`-th of `size` equal parts of a flat buffer."""
    elements = data.numel() // size
    return data[rank * elements : (rank + 1) * elements]


@dataclass(frozen=True, slots=True)
class FullBuffer:
    """All slices. data: [layout.total_elements]."""

    layout: Layout
    data: torch.Tensor

    def tensor(self, index: int) -> torch.Tensor:
        """View of tensor `index` in its own shape."""
        slot = self.layout.slots[index]
        return self.data[slot.offset : slot.end].view(slot.shape)

    def zero_gaps(self) -> None:
        """Zero what belongs to no tensor, so that a reduction never carries stale memory."""
        for start, end in self.layout.gaps():
            self.data[start:end].zero_()


@dataclass(frozen=True, slots=True)
class SliceBuffer:
    """One slice. data: [layout.slice_elements], whether a tensor of its own or part of another."""

    layout: Layout
    rank: int
    data: torch.Tensor

    def rows(self, index: int) -> torch.Tensor:
        """View of the whole rows of tensor `index` in this slice: [rows, *shape[1:]], rows >= 0."""
        local = self.layout.local_rows(index, self.rank)
        shape = self.layout.slots[index].shape
        flat = self.data[local.start : local.start + local.elements]
        return flat.view(local.rows, *shape[1:]) if shape else flat.view(local.rows)
