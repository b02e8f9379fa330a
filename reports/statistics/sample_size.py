"""What a number of runs can decide at best: an exact test with few samples has a smallest p-value.

Three runs against three can be split in 20 ways, so the most extreme outcome there is has a
two-sided p-value of 2/20 = 0.10: no effect, however large, is significant at 5 %.
"""

from __future__ import annotations

import math
from fractions import Fraction

MOST_RUNS = 64


def smallest_paired_p(blocks: int) -> float:
    """Two-sided p-value when all of `blocks` differences point the same way: 2 / 2^n, at most 1."""
    return min(1.0, 2.0 ** (1 - blocks))


def smallest_unpaired_p(base: int, head: int) -> float:
    """Two-sided p-value when every head lies beyond every base: 2 / (base + head choose head)."""
    return min(1.0, 2 / math.comb(base + head, head))


def smallest_deciding_n(alpha: float, *, paired: bool, tests: int = 1) -> int:
    """Fewest blocks (or runs per side) with which one changed cell among `tests` could be found.

    Benjamini-Hochberg asks of a single small p-value among `tests` that it is at most alpha/tests.

    Raises:
        ValueError: more than `MOST_RUNS` would be needed.
    """
    bound = Fraction(str(alpha)) / max(1, tests)
    for runs in range(1, MOST_RUNS + 1):
        ways = 2**runs if paired else math.comb(2 * runs, runs)
        if Fraction(2, ways) <= bound:
            return runs
    raise ValueError(f"no number of runs up to {MOST_RUNS} decides at {alpha} among {tests} tests")
