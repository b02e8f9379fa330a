"""Bytes that one rank sends, counted by the ring convention so that engines can be compared.

For n ranks and a full buffer of B bytes: all-gather and reduce-scatter send (n-1)/n * B, all-reduce
twice that. What the transport really does (trees, switches, compression) is not seen here.
Counted: parameter gathers and gradient reductions. Not counted: the one-off broadcast of initial
weights and the scalar reduction of the gradient norm (a few bytes per step).
"""

from __future__ import annotations

from collections import Counter

import torch


class RingBytes:
    """Running totals for one rank of a group of `ranks`; a method's `ranks` is a smaller group.

    gathered_bytes: of `sent_bytes`, what gathers of weights sent, by torch's name of the dtype.
    """

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self.sent_bytes = 0
        self.gathered_bytes: Counter[str] = Counter()

    def gather(self, full_bytes: int, dtype: torch.dtype, ranks: int | None = None) -> None:
        """Count an all-gather of weights into a full buffer."""
        ranks = ranks or self._ranks
        sent = (ranks - 1) * full_bytes // ranks
        self.sent_bytes += sent
        self.gathered_bytes[str(dtype).removeprefix("torch.")] += sent

    def reduce_scatter(self, full_bytes: int, ranks: int | None = None) -> None:
        """Count a reduce-scatter out of a full buffer."""
        ranks = ranks or self._ranks
        self.sent_bytes += (ranks - 1) * full_bytes // ranks

    def all_reduce(self, full_bytes: int, ranks: int | None = None) -> None:
        """Count an all-reduce: a reduce-scatter followed by an all-gather."""
        ranks = ranks or self._ranks
        self.sent_bytes += 2 * (ranks - 1) * full_bytes // ranks
