"""Where a rank stands on the two data-parallel axes, and which part of a flat buffer is its own.

A buffer of N*M equal sub-shards on N inner and M outer ranks (HFSDP; N=3, M=2):

    sub-shards    | 0 | 1 | 2 | 3 | 4 | 5 |
    inner slice   |   0   |   1   |   2   |      what inner rank i gathers and reduces
    outer rank    | 0   1 | 0   1 | 0   1 |      of the inner slice: who optimizes it

Sub-shards are inner-major. A DTensor on the mesh (outer, inner) would read `[Shard(0), Shard(0)]`
as outer-major and permute rows (R13).
"""

from __future__ import annotations

from dataclasses import dataclass

from mfsdp_core.plan.strategy import Placement, Strategy


@dataclass(frozen=True)
class Coordinate:
    """Rank and size along each axis; without an outer axis its size is 1."""

    inner_rank: int
    inner_size: int
    outer_rank: int = 0
    outer_size: int = 1
    has_outer_axis: bool = False

    @property
    def data_parallel_size(self) -> int:
        """Ranks that share a parameter, on both axes."""
        return self.inner_size * self.outer_size

    def sub_shards(self, strategy: Strategy) -> int:
        """Equal slices that a layout needs, so that every owner's part is whole rows."""
        return self.inner_size * (self.outer_size if strategy.outer.shards_optimizer else 1)

    def range_of(self, slices: int, outer: Placement, inner: Placement) -> range:
        """Which of all `slices` of a layout this rank holds of a buffer placed so.

        Everything that a rank holds, sends, reduces or optimizes is such a range.
        """
        start, held = 0, slices
        if inner is Placement.FLAT:
            held //= self.inner_size
            start = self.inner_rank * held
        if outer is Placement.FLAT:
            held //= self.outer_size
            start += self.outer_rank * held
        return range(start, start + held)
