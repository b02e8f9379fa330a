"""Bandwidth of a collective from its time, by the formulas of nccl-tests (doc/PERFORMANCE.md).

Algorithm bandwidth is the size of the whole buffer over the time. Bus bandwidth is what each link
carries, and so does not depend on the number of ranks: of n ranks, an all-gather, and a
reduce-scatter as well, moves (n-1)/n of the buffer through each, an all-reduce both one after the
other, a broadcast all of it.
"""

from __future__ import annotations

from bench.spec import CollectiveName


def algorithm_bytes_per_second(size_bytes: int, milliseconds: float) -> float:
    """Bytes of the buffer per second.

    Args:
        size_bytes: of the whole buffer, as `CollectiveSettings.size_bytes`.
        milliseconds: of one operation, until its slowest rank is done.
    """
    return size_bytes / (milliseconds / 1e3)


def bus_factor(operation: CollectiveName, ranks: int) -> float:
    """Bus bandwidth over algorithm bandwidth."""
    if operation == "broadcast":
        return 1.0
    return (2 if operation == "all_reduce" else 1) * (ranks - 1) / ranks
