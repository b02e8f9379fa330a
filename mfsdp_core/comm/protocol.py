"""What the runtime asks of a transport, and the shape of an answer that is still under way."""

from __future__ import annotations

from typing import Protocol

import torch


class Pending(Protocol):
    """A collective that was issued."""

    def wait(self) -> object:
        """Return once the result may be used on the current stream (CPU: once it is there)."""


class Done:
    """A collective that needed no communication."""

    def wait(self) -> None:
        """Return at once."""


class Communicator(Protocol):
    """Collectives over the ranks of one mesh axis.

    Buffers are one-dimensional and contiguous; `full` has `size` equal slices and `own` is slice
    `rank` of it, either in place (a view of `full`) or apart. `bucket` names the buffer in events.
    """

    size: int
    rank: int

    def all_gather(self, full: torch.Tensor, own: torch.Tensor, bucket: str) -> Pending:
        """Fill `full` with every rank's `own`."""

    def reduce_scatter(
        self, own: torch.Tensor, full: torch.Tensor, bucket: str, *, average: bool
    ) -> Pending:
        """Put the sum (or mean) over ranks of slice `rank` of `full` into `own`."""

    def all_reduce(self, full: torch.Tensor, bucket: str, *, average: bool) -> Pending:
        """Replace `full` by its sum (or mean) over ranks."""

    def broadcast(self, full: torch.Tensor, bucket: str) -> Pending:
        """Replace `full` by rank 0's."""
