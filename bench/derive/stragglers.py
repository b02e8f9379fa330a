"""Which ranks and nodes a run waited for, from who was last in each step.

[Note: who is last] Ranks of a step wait for each other in its collectives, so a slow rank makes all
steps longer, and its own by little more than theirs. What it cannot hide is being last: among equal
ranks each is last equally often. A rank or node that is last far more often (a binomial tail below
0.1 %, corrected for their number) and by at least 0.5 % of a step is named.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from bench.record import RunRecord, SteadyWindow

_LEVEL = 1e-3
_LEAST_LAG = 5e-3


@dataclass(frozen=True)
class Lag:
    """How one rank or node compares with the others of its run.

    milliseconds: median over steps of its time, of a node that of its slowest rank. last: steps in
    which it was last, out of `steps`; expected: of equal ranks. lag_milliseconds: median of how
    much longer it took than the median rank of the same step.
    """

    name: str
    ranks: int
    milliseconds: float
    last: int
    steps: int
    expected: float
    lag_milliseconds: float
    is_straggler: bool


@dataclass(frozen=True)
class RankSpread:
    """nodes: by node, in the order of first ranks; empty on one node, or where it is not known."""

    nodes: tuple[Lag, ...]
    ranks: tuple[Lag, ...]

    @property
    def stragglers(self) -> tuple[Lag, ...]:
        """Nodes that are last too often; where no node is, ranks."""
        nodes = tuple(lag for lag in self.nodes if lag.is_straggler)
        return nodes or tuple(lag for lag in self.ranks if lag.is_straggler)


def spread(record: RunRecord, window: SteadyWindow) -> RankSpread | None:
    """Over the steps of `window`; None with one rank, or where a rank lacks one of them."""
    times = _times(record, window)
    if len(times) < 2 or not times[0]:  # noqa: PLR2004 - nobody to wait for
        return None
    placement = record.placement
    names = {rank: f"rank {rank}" for rank in range(len(times))}
    nodes: Mapping[str, Sequence[int]] = {}
    if placement is not None and len(placement.ranks_by_node) > 1:
        nodes = {f"node {node}": ranks for node, ranks in placement.ranks_by_node.items()}
        names = {rank: f"rank {rank} on {placement.nodes[rank]}" for rank in names}
    by_rank = {name: [rank] for rank, name in names.items()}
    return RankSpread(_lags(times, nodes), _lags(times, by_rank))


def _times(record: RunRecord, window: SteadyWindow) -> list[list[float]]:
    """Milliseconds by rank and step of the window; empty where one is missing."""
    wanted = range(window.first, window.last + 1)
    times = []
    for rank in range(record.resolved.launch.ranks):
        found = {one.step: one.milliseconds for one in record.steps.get(rank, ())}
        if any(step not in found for step in wanted):
            return []
        times.append([found[step] for step in wanted])
    return times


def _lags(times: Sequence[Sequence[float]], groups: Mapping[str, Sequence[int]]) -> tuple[Lag, ...]:
    steps = list(zip(*times, strict=True))
    last = [max(range(len(step)), key=step.__getitem__) for step in steps]
    middle = [median(step) for step in steps]
    found = []
    for name, ranks in groups.items():
        own = [max(step[rank] for rank in ranks) for step in steps]
        often = sum(rank in ranks for rank in last)
        share = len(ranks) / len(times)
        lag = median(mine - other for mine, other in zip(own, middle, strict=True))
        chance = _tail(often, len(steps), share) * len(groups)
        slow = chance < _LEVEL and lag >= _LEAST_LAG * median(middle)
        found.append(
            Lag(name, len(ranks), median(own), often, len(steps), share * len(steps), lag, slow)
        )
    return tuple(found)


def _tail(successes: int, tries: int, share: float) -> float:
    """Probability of at least so many successes (binomial distribution)."""
    if share >= 1.0:
        return 1.0
    return math.fsum(
        math.exp(
            math.lgamma(tries + 1)
            - math.lgamma(k + 1)
            - math.lgamma(tries - k + 1)
            + k * math.log(share)
            + (tries - k) * math.log1p(-share)
        )
        for k in range(successes, tries + 1)
    )
