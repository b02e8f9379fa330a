"""An interval of the paired ratio that stays valid however often one looks, and whenever one stops.

A difference d (log head - log base of one start) is symmetric around the true change, because the
order within a block is drawn. So for a bound x that the true change does not exceed,
tanh(l (d - x)) has no positive mean for any l that was chosen before d was seen, and

    wealth(x) = product over starts of (1 + tanh(l_i (d_i - x)))  =  product of e^z / cosh z

does not grow on average: it passes 1/a at any time with a chance of at most a (Ville 1939). That is
a sign-flip test made sequential: given |d - x| its sign is a fair coin, and a bet of tanh(z) is
placed on it. For normal differences e^z / cosh z is the likelihood ratio of the symmetrised
hypotheses (de la Pena 1999 bounds it by e^(z - z^2 / 2)); the best l is change / variance. As
neither is known, the wealth is spread over `STRENGTHS` multiples of 1 / spread, the spread being
that of the differences seen before.

Changes that either side's wealth has refuted at some look are outside of the interval for good:
what is decided stays decided.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from reports.statistics.interval import Interval

STRENGTHS = (0.25, 0.5, 1.0, 2.0, 4.0)
"""Distance of the truth from a bound, in spreads, that each share of the wealth is best at."""

PRIOR_SPREAD = 0.02
"""Stands for one difference before the first; a wrong one costs power, never validity."""

_REACH = 60.0  # so far out every bet is won, whatever the differences
_BOUNDS = 48
_ROUNDS = 5


@dataclass(frozen=True)
class ConfidenceSequence:
    """What is known of a change after each of `differences`, in the order of their measurement."""

    differences: tuple[float, ...]

    def p_above(self, bound: float) -> float:
        """P-value of "the change is at most `bound`", valid at every look and after any stop."""
        return math.exp(-self._best(bound, 1.0))

    def p_below(self, bound: float) -> float:
        """P-value of "the change is at least `bound`"."""
        return math.exp(-self._best(bound, -1.0))

    def interval(self, alpha: float) -> Interval | None:
        """The changes that no look has refuted at `alpha` / 2; None while none can be.

        It may be empty (low > high) where the differences contradict their own symmetry.
        """
        needed = math.log(2 / alpha)
        if len(self.differences) * math.log(2) <= needed:
            return None
        return self._end(needed, 1.0), self._end(needed, -1.0)

    def _best(self, bound: float, side: float) -> float:
        """Logarithm of the largest wealth of any look, at least 0. side: 1 above, -1 below."""
        if not self.differences:
            return 0.0
        return max(0.0, float(log_wealth(self._array, self._bets, bound, side).max()))

    def _end(self, needed: float, side: float) -> float:
        """The nearest bound on one side that is refuted: wealth falls from `far` to `near`."""
        values, reach = side * self._array, _REACH / float(self._bets.min())
        far, near = float(values.min()) - reach, float(values.max()) + reach
        for _ in range(_ROUNDS):
            bounds = np.linspace(far, near, _BOUNDS)
            wealth = log_wealth(values, self._bets, bounds[:, None], 1.0).max(axis=-1)
            refuted = int(np.flatnonzero(wealth >= needed).max(initial=0))
            far, near = float(bounds[refuted]), float(bounds[min(refuted + 1, _BOUNDS - 1)])
        return side * far

    @cached_property
    def _array(self) -> np.ndarray:
        return np.asarray(self.differences, dtype=float)

    @cached_property
    def _bets(self) -> np.ndarray:
        return bets(self._array)


def bets(differences: np.ndarray) -> np.ndarray:
    """l_i for every difference and strength, from the differences before it only.

    Args:
        differences: shape (..., starts).

    Returns:
        Shape (..., starts, strengths).
    """
    count = np.arange(differences.shape[-1], dtype=float)
    before = np.zeros_like(differences)
    squares = np.zeros_like(differences)
    before[..., 1:] = np.cumsum(differences, axis=-1)[..., :-1]
    squares[..., 1:] = np.cumsum(differences**2, axis=-1)[..., :-1]
    around_mean = np.maximum(squares - before**2 / np.maximum(count, 1), 0.0)
    variance = (PRIOR_SPREAD**2 + around_mean) / np.maximum(count, 1)
    found: np.ndarray = np.asarray(STRENGTHS) / np.sqrt(variance)[..., None]
    return found


def log_wealth(
    differences: np.ndarray, strengths: np.ndarray, bound: float | np.ndarray, side: float
) -> np.ndarray:
    """Logarithm of the wealth after every start, shape (..., starts); `strengths` as of `bets`."""
    z = side * strengths * (differences - bound)[..., None]
    each = np.cumsum(math.log(2) - np.logaddexp(0.0, -2 * z), axis=-2)  # log(e^z / cosh z)
    total: np.ndarray = np.logaddexp.reduce(each, axis=-1) - math.log(len(STRENGTHS))
    return total


def typical_starts(distance: float, spread: float, alpha: float) -> float:
    """Starts until a change at `distance` beyond (or inside) a bound is usually decided.

    The wealth of the best strength grows by log(e^z / cosh z) a start, about
    distance^2 / (2 spread^2) where that is small and at most log 2; it must reach 2 / alpha with
    what the others cost.
    """
    if distance <= 0:
        return math.inf
    growth = math.log(2) if spread <= 0 else min(math.log(2), 0.5 * (distance / spread) ** 2)
    return (math.log(2 / alpha) + 1.0) / growth
