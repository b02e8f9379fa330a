"""Bytes that one rank sends, counted by the ring convention so that engines can be compared.

For n ranks and a full buffer of B bytes: all-gather and reduce-scatter send (n-1)/n * B, all-reduce
twice that. What the transport really does (trees, switches, compression) is not seen here.
Counted: parameter gathers and gradient reductions. Not counted: the one-off broadcast of initial
weights and the scalar reduction of the gradient norm (a few bytes per step).
"""

from __future__ import annotations


class RingBytes:
    """Running total for one rank of a group of `ranks`."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self.sent_bytes = 0

    def scatter_or_gather(self, full_bytes: int, ranks: int | None = None) -> None:
        """Count an all-gather into, or a reduce-scatter out of, a full buffer.

        ranks: of a smaller group than that of the total.
        """
        ranks = ranks or self._ranks
        self.sent_bytes += (ranks - 1) * full_bytes // ranks

    def all_reduce(self, full_bytes: int, ranks: int | None = None) -> None:
        """Count an all-reduce: a reduce-scatter followed by an all-gather. ranks: as above."""
        ranks = ranks or self._ranks
        self.sent_bytes += 2 * (ranks - 1) * full_bytes // ranks
