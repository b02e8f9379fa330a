"""What a number of runs can decide: the smallest p-values there are, and many cells at once.

Three runs against three can be split in 20 ways, so the most extreme outcome there is has a
two-sided p-value of 2/20 = 0.10: no effect, however large, is significant at 5 %. Many cells are
many chances for a false alarm, so p-values are adjusted (Benjamini-Hochberg).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np

MOST_RUNS = 64


def adjusted(p_values: Sequence[float]) -> list[float]:
    """P-values adjusted so that at most alpha of all alarms raised at alpha are false on average.

    Valid for independent and for positively dependent tests (cells measured side by side).
    """
    given = np.asarray(p_values, dtype=float)
    falling = np.argsort(-given, kind="stable")
    scaled = given[falling] * (given.size / np.arange(given.size, 0, -1))
    found = np.empty_like(given)
    found[falling] = np.minimum(1.0, np.minimum.accumulate(scaled))
    return [float(value) for value in found]


def smallest_p(base: int, head: int, *, paired: bool) -> Fraction:
    """Two-sided p-value when every head lies beyond its base, at most 1.

    Of n blocks 2 / 2^n; of runs measured apart 2 / (base + head choose head).
    """
    return min(Fraction(1), Fraction(2, 2**base if paired else math.comb(base + head, head)))


def smallest_deciding_n(alpha: float, *, paired: bool, tests: int = 1) -> int:
    """Fewest blocks (or runs per side) with which one changed cell among `tests` could be found.

    Benjamini-Hochberg asks of a single small p-value among `tests` that it is at most alpha/tests.

    Raises:
        ValueError: more than `MOST_RUNS` would be needed.
    """
    bound = Fraction(str(alpha)) / max(1, tests)
    for runs in range(1, MOST_RUNS + 1):
        if smallest_p(runs, runs, paired=paired) <= bound:
            return runs
    raise ValueError(f"no number of runs up to {MOST_RUNS} decides at {alpha} among {tests} tests")
