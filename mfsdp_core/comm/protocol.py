"""What the runtime asks of a transport, and the shape of an answer that is still under way."""

from __future__ import annotations

from typing import Protocol

import torch


class Pending(Protocol):
    """A collective that was issued."""

    def wait(self) -> object:
        """Return once the result may be used on the current stream (CPU: once it is there)."""


class PendingSum(Protocol):
    """A reduction that was issued."""

    def wait(self) -> torch.Tensor:
        """Return this rank's result: the tensor it was to go to, or one of higher precision."""


class Done:
    """A collective that needed no communication."""

    def wait(self) -> None:
        """Return at once."""


class Summed:
    """A reduction whose result goes to a tensor known beforehand."""

    def __init__(self, result: torch.Tensor, pending: Pending) -> None:
        self._result = result
        self._pending = pending

    def wait(self) -> torch.Tensor:
        """That tensor, once the reduction has ended."""
        self._pending.wait()
        return self._result


class Scratch(Protocol):
    """Memory that a transport needs while a collective is under way."""

    def acquire(self, bucket: str, elements: int, dtype: torch.dtype) -> torch.Tensor:
        """One-dimensional, contents undefined."""

    def release(self, bucket: str, memory: torch.Tensor) -> None:
        """Give it back."""


class Communicator(Protocol):
    """Collectives over the ranks of one mesh axis.

    Buffers are one-dimensional and contiguous; `full` has `size` equal slices and `own` is slice
    `rank` of it, either in place (a view of `full`) or apart. `bucket` names the buffer in events,
    `role` the group. transport: what carries the bytes.
    takes_scratch: reductions hold as much memory of their own as arrives, while they are under way;
    sums that are wider than the wire do on any backend.
    `total` is the dtype in which reductions add up; see [Note: one rounding] of `plan.config`.
    """

    size: int
    rank: int
    role: str
    transport: str
    takes_scratch: bool

    def rendezvous(self, bucket: str) -> None:
        """Before a gather that other ranks may not make, where nothing else would tell."""

    def all_gather(self, full: torch.Tensor, own: torch.Tensor, bucket: str) -> Pending:
        """Fill `full` with every rank's `own`."""

    def reduce_scatter(
        self,
        own: torch.Tensor,
        full: torch.Tensor,
        bucket: str,
        *,
        average: bool,
        total: torch.dtype,
    ) -> PendingSum:
        """Sum (or mean) over ranks of slice `rank` of `full`, into `own` or a tensor of `total`."""

    def reduces_into(self, total: torch.dtype, result: torch.dtype) -> bool:
        """Whether the `own` of a reduction may be of dtype `result`."""

    def all_reduce(
        self, full: torch.Tensor, bucket: str, *, average: bool, total: torch.dtype
    ) -> PendingSum:
        """Replace `full` by its sum (or mean) over ranks, rounded once to its dtype."""

    def all_reduce_max(self, values: torch.Tensor, bucket: str) -> None:
        """Replace `values` by their maximum over ranks; returns when it is there."""

    def broadcast(self, full: torch.Tensor, bucket: str) -> Pending:
        """Replace `full` by rank 0's."""
