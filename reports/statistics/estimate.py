"""A ratio of times, what is known about it, and how it was obtained."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean

import numpy as np

from reports.statistics.interval import Interval, p_above, subset_means, swap_means, trimmed
from reports.statistics.sample_size import smallest_paired_p, smallest_unpaired_p
from reports.statistics.sequential import ConfidenceSequence


@dataclass(frozen=True)
class RatioEstimate:
    """Head over base. Everything in natural logarithms: 0 is no change, log(1.05) is 5 % more.

    base, head: log samples, one per run; with `paired`, the i-th of both are of one block.
    typical: what the test inverts to, see `reports.statistics.interval`.
    log_ratio: mean difference (the ratio is a geometric mean). interval: exact, by inverting the
    permutation test, None where so few runs can exclude nothing.
    """

    paired: bool
    base: tuple[float, ...]
    head: tuple[float, ...]
    log_ratio: float
    interval: Interval | None
    alpha: float
    typical: np.ndarray = field(compare=False, repr=False)

    @property
    def n(self) -> int:
        """Blocks, or runs of the smaller side."""
        return min(len(self.base), len(self.head))

    @property
    def ratio(self) -> float:
        """Head over base as a plain factor."""
        return math.exp(self.log_ratio)

    @property
    def smallest_p(self) -> float:
        """The smallest p-value that so many runs could give."""
        if self.paired:
            return smallest_paired_p(len(self.base))
        return smallest_unpaired_p(len(self.base), len(self.head))

    def p_above(self, bound: float) -> float:
        """One-sided p-value of "the log ratio is at most `bound`", by the same rearrangements."""
        return p_above(self.typical, bound)

    def p_below(self, bound: float) -> float:
        """One-sided p-value of "the log ratio is at least `bound`"."""
        return p_above(-self.typical[::-1], -bound)

    def p_beyond(self, tolerance: float) -> float:
        """Two-sided p-value of "the change stays within the tolerance"; `tolerance` as a log."""
        return min(1.0, 2 * min(self.p_above(tolerance), self.p_below(-tolerance)))


@dataclass(frozen=True)
class SequentialEstimate(RatioEstimate):
    """As a paired `RatioEstimate`, but valid after every block: `sequence` takes the test's place.

    base, head: log samples, one per start, in the order of their measurement.
    """

    sequence: ConfidenceSequence = field(default_factory=lambda: ConfidenceSequence(()))

    def p_above(self, bound: float) -> float:
        """P-value of "the log ratio is at most `bound`", however often it was looked at."""
        return self.sequence.p_above(bound)

    def p_below(self, bound: float) -> float:
        """P-value of "the log ratio is at least `bound`"."""
        return self.sequence.p_below(bound)


def estimate_sequential(
    base: Sequence[float], head: Sequence[float], alpha: float = 0.05
) -> SequentialEstimate:
    """As `estimate_paired` for blocks whose number was decided by looking at them.

    Raises:
        ValueError: as `estimate_paired`.
    """
    before, after = _blocks(base, head)
    differences = tuple(b - a for a, b in zip(before, after, strict=True))
    sequence = ConfidenceSequence(differences)
    return SequentialEstimate(
        paired=True,
        base=before,
        head=after,
        log_ratio=fmean(differences),
        interval=sequence.interval(alpha),
        alpha=alpha,
        typical=np.zeros(0),
        sequence=sequence,
    )


def estimate_paired(
    base: Sequence[float], head: Sequence[float], alpha: float = 0.05
) -> RatioEstimate:
    """Blocks of interleaved runs: `base[i]` and `head[i]` (positive, same unit) are of block i.

    Raises:
        ValueError: no block, different lengths, or a value that is not positive and finite.
    """
    before, after = _blocks(base, head)
    differences = [b - a for a, b in zip(before, after, strict=True)]
    typical = subset_means(differences)
    return RatioEstimate(
        paired=True,
        base=before,
        head=after,
        log_ratio=fmean(differences),
        interval=trimmed(typical, alpha),
        alpha=alpha,
        typical=typical,
    )


def estimate_unpaired(
    base: Sequence[float], head: Sequence[float], alpha: float = 0.05
) -> RatioEstimate:
    """Two sides measured apart; one run on a side gives a ratio and nothing else.

    Raises:
        ValueError: an empty side, or a value that is not positive and finite.
    """
    before, after = _logs(base), _logs(head)
    if not before or not after:
        raise ValueError(f"both sides need a run: {len(before)} base, {len(after)} head")
    typical = swap_means(before, after)
    return RatioEstimate(
        paired=False,
        base=before,
        head=after,
        log_ratio=fmean(after) - fmean(before),
        interval=trimmed(typical, alpha),
        alpha=alpha,
        typical=typical,
    )


def _blocks(
    base: Sequence[float], head: Sequence[float]
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    before, after = _logs(base), _logs(head)
    if not before or len(before) != len(after):
        raise ValueError(f"blocks need both sides: {len(before)} base, {len(after)} head")
    return before, after


def _logs(values: Sequence[float]) -> tuple[float, ...]:
    bad = next((value for value in values if not 0 < value < math.inf), None)
    if bad is not None:
        raise ValueError(f"a ratio needs positive finite values, found {bad}")
    return tuple(math.log(value) for value in values)
