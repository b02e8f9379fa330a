"""Where the level of a series changed, by how much, and with which interval. Pure.

Numbers that repeat exactly (memory, bytes, counts, losses) change where they differ by more than
the tolerance of the policy. Times vary, so `ruptures` proposes where the level may have changed,
and the judgement of a gate decides: a change point is one whose interval is beyond the tolerance.
The tolerance is that of the policy, never below the noise floor of the machine, and never below
twice the spread from point to point: nights differ by more than the starts of one night do.
"""

from __future__ import annotations

import importlib.util
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

import numpy as np

from bench.derive.metrics import MetricRule
from reports.gates.judgement import Judgement, MetricSamples, judge_intervals, judge_values
from reports.history.series import Point, Series

FEWEST_STARTS = 3
"""A point with fewer starts is shown, and decides nothing about a time."""

FEWEST_POINTS = 2
"""On each side of a change of level: one odd night is no level."""

_MAD_TO_SIGMA = 1.4826
_PENALTY = 2.0
_TIMES_THE_WOBBLE = 2.0


@dataclass(frozen=True)
class ChangePoint:
    """before: the last point of the old level. after: the first of the new one; both indices.

    same_code: nothing of the code changed between them, so the machine did.
    """

    before: int
    after: int
    judgement: Judgement
    same_code: bool


@dataclass(frozen=True)
class Levels:
    """changes: in order. tolerance: as it was used. wobble: relative spread from point to point.

    remark: why there is no answer, or what to know of it; "" for nothing.
    """

    changes: tuple[ChangePoint, ...]
    tolerance: float
    wobble: float = 0.0
    remark: str = ""


def can_find() -> bool:
    """Whether the package is there that proposes change points of times."""
    return importlib.util.find_spec("ruptures") is not None


def levels(series: Series, rule: MetricRule, *, alpha: float, floor: float = 0.0) -> Levels:
    """The change points of a series.

    Args:
        series: what to look at.
        rule: that of its metric in the policy.
        alpha: chance of a false alarm, two-sided, adjusted over the candidates of the series.
        floor: noise floor of the machine for this cell; 0 if it was not calibrated.
    """
    asked = max(rule.tolerance or 0.0, series.metric.least_tolerance)
    if series.metric.judge != "interval":
        bound = series.loss_bound or 0.0 if rule.tolerance is None else asked
        return Levels(_of_exact(series, rule, bound), bound)
    chosen = [at for at, point in enumerate(series.points) if len(point.values) >= FEWEST_STARTS]
    if len(chosen) < 2 * FEWEST_POINTS:
        return Levels(
            (),
            asked,
            remark=f"{len(chosen)} of {len(series.points)} points have {FEWEST_STARTS} starts; "
            f"{2 * FEWEST_POINTS} are needed to tell two levels apart",
        )
    if not can_find():
        why = "no change points without ruptures: pip install 'mfsdp-bench[history]'"
        return Levels((), asked, remark=why)
    signal = np.log([series.points[at].value for at in chosen])
    wobble = _wobble(signal)
    tolerance = max(asked, floor, _TIMES_THE_WOBBLE * wobble)
    cuts = _proposed(signal, wobble)
    points = [series.points[at] for at in chosen]
    while cuts:
        own = [dict(enumerate(level)) for level in _starts_by_level(points, cuts)]
        cases = [
            MetricSamples("", base, head, paired=False, tolerance=tolerance, floor=floor > asked)
            for base, head in itertools.pairwise(own)
        ]
        judged = judge_intervals(cases, series.metric, rule, alpha)
        undecided = [
            (abs(math.log(one.ratio or 1.0)), cut)
            for one, cut in zip(judged, cuts, strict=True)
            if one.verdict not in ("regressed", "improved")
        ]
        if not undecided:
            changes = (
                _change(series, chosen[cut - 1], chosen[cut], replace(one, cell=series.name))
                for one, cut in zip(judged, cuts, strict=True)
            )
            return Levels(tuple(changes), tolerance, wobble)
        # The smallest step joins its two levels; what remains is judged again.
        cuts.remove(min(undecided)[1])
    return Levels((), tolerance, wobble)


def _of_exact(series: Series, rule: MetricRule, tolerance: float) -> tuple[ChangePoint, ...]:
    found, level = [], series.points[0]
    for at, point in enumerate(series.points[1:], start=1):
        judged = judge_values(
            series.name, series.metric, rule, level.values, point.values, tolerance=tolerance
        )
        if judged.verdict in ("regressed", "improved"):
            found.append(_change(series, at - 1, at, judged))
            level = point
    return tuple(found)


def _change(series: Series, before: int, after: int, judged: Judgement) -> ChangePoint:
    codes = [series.points[at].code for at in (before, after)]
    return ChangePoint(before, after, judged, same_code=bool(codes[0]) and codes[0] == codes[1])


def _wobble(signal: np.ndarray) -> float:
    """Spread of one point, from neighbours: a change of level is one large difference of many."""
    differences = np.diff(signal)
    middle = float(np.median(np.abs(differences - np.median(differences))))
    return _MAD_TO_SIGMA * middle / math.sqrt(2)


def _proposed(signal: np.ndarray, wobble: float) -> list[int]:
    """Indices at which a new level may begin: PELT, least absolute differences, 2 log n each."""
    import ruptures

    scaled = (signal - signal.mean()) / (wobble or 1e-9)
    search = ruptures.Pelt(model="l1", min_size=FEWEST_POINTS, jump=1).fit(scaled.reshape(-1, 1))
    return [int(at) for at in search.predict(pen=_PENALTY * math.log(signal.size))[:-1]]


def _starts_by_level(points: Sequence[Point], cuts: Sequence[int]) -> list[list[float]]:
    """The values of all starts between two cuts."""
    return [
        [value for point in points[a:b] for value in point.values]
        for a, b in itertools.pairwise((0, *cuts, len(points)))
    ]


def level_medians(series: Series, found: Levels) -> list[tuple[int, int, float]]:
    """Of every level: its first point, the one behind its last, and the median over its starts."""
    cuts = [change.after for change in found.changes]
    edges = itertools.pairwise((0, *cuts, len(series.points)))
    levels_ = _starts_by_level(series.points, cuts)
    return [(a, b, median(level)) for (a, b), level in zip(edges, levels_, strict=True)]
