"""Which steps of a run count: warm-up cut by evidence, drift refused.

```
 ms |x
    |  x        o                      dropped: always the first DROPPED_STEPS
    |    x x          o                cut: the start that the truncation rule finds different
    |- - - - x-x-x-x-x-x-x-x-x-x- -    window [first, last]: its median is the run's number
    +----+---+----------------------   outliers (o) stay in: a median does not follow them
     drop cut        window
```

Two steps. *Truncation*: of all cuts that leave at least half of the run, take the one with the
smallest standard error of the mean of what remains (MSER, White 1997), on values clipped around
their median, because the classic rule cuts behind the last outlier instead of behind the warm-up.
*Stability*: the window must not drift. A drift counts when it is both large (the Theil-Sen slope of
the rolling median, over the window's length, passes `DRIFT_TOLERANCE`) and not chance (two-sided
Mann-Kendall trend test at `TREND_ALPHA`). Both are needed: on a busy two-core machine 20 steps show
drifts of several percent by chance alone, and on a quiet GPU a drift of 0.1 % is significant.
Where the run as a whole had a trend (a warm-up, or a real drift), its window is tested ten times
more strictly, and a window that drifts may be cut further only down to a small drift estimate: a
shorter window has less power to show the trend that the longer one showed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations
from statistics import NormalDist, median

from bench.record import SteadyWindow

METHOD = "mser-clipped+theil-sen/mann-kendall-v1"

DROPPED_STEPS = 2
"""Always dropped: step 1 allocates lazily, step 2 is the first that finds optimizer state."""

MIN_WINDOW_STEPS = 6
"""Fewer steps than this give no number; Mann-Kendall at 0.002 needs about as many to reject."""

DRIFT_TOLERANCE = 0.05
"""Relative change of the rolling median across the window that is still called steady."""

TREND_ALPHA = 0.002
"""Chance of a false trend per test; simulated false alarms stay below 1 % of runs (README)."""

SUSPECT_ALPHA = 0.02
"""The same for the window of a run that had a trend before it was cut."""

_CLIP_SPREADS = 3.0
_SPREAD_PER_MAD = 1.4826  # standard deviations per median absolute deviation, normal distribution
_MOST_POINTS = 256


def steady_window(milliseconds: Sequence[float]) -> SteadyWindow:
    """The steady part of one run's step times.

    Args:
        milliseconds: wall time of step 1, 2, ... n, each positive and finite.

    Returns:
        A window with 1-based inclusive bounds. `stable` False means that no time is reported; its
        `reason` says why and its bounds are the best candidate (for a plot), 0 and 0 if none.
    """
    count = len(milliseconds)
    if count < DROPPED_STEPS + MIN_WINDOW_STEPS:
        reason = (
            f"{count} steps; at least {DROPPED_STEPS + MIN_WINDOW_STEPS} are needed "
            f"({DROPPED_STEPS} dropped, {MIN_WINDOW_STEPS} measured)"
        )
        return _unstable(0, 0, reason)
    broken = next((i for i, x in enumerate(milliseconds) if not (0 < x < math.inf)), None)
    if broken is not None:
        return _unstable(0, 0, f"step {broken + 1} has no usable time ({milliseconds[broken]})")

    values = [float(x) for x in milliseconds]
    last_cut = max(DROPPED_STEPS, min(count // 2, count - MIN_WINDOW_STEPS))
    alpha = SUSPECT_ALPHA if _drifts(values[DROPPED_STEPS:], TREND_ALPHA) else TREND_ALPHA
    cut = _truncation(values, last_cut)
    if not _drifts(values[cut:], alpha):
        return _stable(cut, count)
    for later in range(cut + 1, last_cut + 1):
        rest = values[later:]
        if abs(_drift(rest)) <= DRIFT_TOLERANCE and not _has_trend(rest, SUSPECT_ALPHA):
            return _stable(later, count)
    drift = _drift(values[cut:])
    reason = (
        f"the rolling median {'rises' if drift > 0 else 'falls'} by {100 * abs(drift):.1f} % of its"
        f" middle value from step {cut + 1} to step {count} (tolerance {100 * DRIFT_TOLERANCE:.0f}"
        f" %, trend significant at {alpha:g})"
    )
    return _unstable(cut + 1, count, reason)


def _stable(cut: int, count: int) -> SteadyWindow:
    return SteadyWindow(first=cut + 1, last=count, stable=True, method=METHOD)


def _unstable(first: int, last: int, reason: str) -> SteadyWindow:
    return SteadyWindow(first=first, last=last, stable=False, method=METHOD, reason=reason)


def _truncation(values: Sequence[float], last_cut: int) -> int:
    """Number of leading steps to cut, in [DROPPED_STEPS, last_cut]: clipped MSER.

    The clip is set by the half of the run that is always kept, so a long warm-up cannot widen it.
    """
    kept = values[last_cut:]
    centre = median(kept)
    spread = _SPREAD_PER_MAD * median([abs(x - centre) for x in kept])
    low, high = centre - _CLIP_SPREADS * spread, centre + _CLIP_SPREADS * spread
    # Differences from the centre, so that equal times sum to exactly zero.
    clipped = [min(max(x, low), high) - centre for x in values]
    total = sum(clipped[last_cut:])
    squares = sum(x * x for x in clipped[last_cut:])
    best_cut, best_error = last_cut, math.inf
    for cut in range(last_cut, DROPPED_STEPS - 1, -1):
        count = len(values) - cut
        error = max(0.0, squares - total * total / count) / count**2
        if error <= best_error:
            best_cut, best_error = cut, error
        total += clipped[cut - 1]
        squares += clipped[cut - 1] ** 2
    while best_cut < last_cut and values[best_cut] > high:
        best_cut += 1  # the minimum may leave the last slow steps of a warm-up in
    return best_cut


def _drifts(values: Sequence[float], alpha: float) -> bool:
    return abs(_drift(values)) > DRIFT_TOLERANCE and _has_trend(values, alpha)


def _drift(values: Sequence[float]) -> float:
    """Change of the rolling median over the window, relative to its median (0.05 is 5 % up)."""
    width = max(3, len(values) // 4) | 1
    rolling = [median(values[i : i + width]) for i in range(len(values) - width + 1)]
    points = _thinned(rolling)
    slopes = [(points[j] - points[i]) / (j - i) for i, j in combinations(range(len(points)), 2)]
    # Rolling medians span less than the window does: extend their slope to all of it.
    span = (len(points) - 1) * (len(values) - 1) / (len(rolling) - 1)
    return median(slopes) * span / median(values)


def _has_trend(values: Sequence[float], alpha: float) -> bool:
    """Two-sided Mann-Kendall test with the normal approximation and its continuity correction."""
    points = _thinned(values)
    count = len(points)
    score = 0
    for i, j in combinations(range(count), 2):
        score += (points[j] > points[i]) - (points[j] < points[i])
    variance = count * (count - 1) * (2 * count + 5) / 18
    if abs(score) < 1:
        return False
    statistic = (abs(score) - 1) / math.sqrt(variance)
    return 2 * (1 - NormalDist().cdf(statistic)) < alpha


def _thinned(values: Sequence[float]) -> list[float]:
    """Medians of equal blocks, so that the pairwise tests stay cheap for runs of thousands."""
    block = -(-len(values) // _MOST_POINTS)
    if block == 1:
        return list(values)
    covered = len(values) // block * block
    return [median(values[i : i + block]) for i in range(0, covered, block)]
