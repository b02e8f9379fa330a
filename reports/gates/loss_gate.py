"""Is the change still right? Loss curves of head against those of base. Pure.

Bitwise: every loss of every run is the same number. Otherwise two distances are measured, the
largest relative difference at any step and the mean one (the area between the curves), and each is
set against the spread of repeats of the base: runs of one configuration and one code.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from bench.derive.metrics import LossMode
from reports.comparisons.parity import relative_differences
from reports.gates.cell_samples import LossCurve
from reports.gates.judgement import Verdict
from reports.renderers import quantity

SPREAD_FACTOR = 3.0
"""A head curve may be this many times as far away as the two most distant repeats of the base."""


@dataclass(frozen=True)
class LossFinding:
    """The head run that is farthest from the base.

    bound: what the largest relative difference from the nearest base run may reach, None where none
    is asked for.
    """

    verdict: Verdict
    reason: str
    bound: float | None = None


def judge_loss(
    base: Sequence[LossCurve], head: Sequence[LossCurve], mode: LossMode, tolerance: float
) -> LossFinding:
    """Compare all head runs with all base runs (at least one on each side).

    Args:
        base: runs of the reference.
        head: runs to judge.
        mode: bitwise, or against the spread of the base.
        tolerance: relative distance that is accepted even if the repeats agree better.
    """
    lengths = {curve.steps[-1] if curve.steps else 0 for curve in (*base, *head)}
    if len(lengths) > 1 or 0 in lengths:
        found = ", ".join(map(str, sorted(lengths)))
        return LossFinding("regressed", f"the runs have different numbers of steps: {found}")
    return _bitwise(base, head) if mode == "bitwise" else _against_spread(base, head, tolerance)


def _bitwise(base: Sequence[LossCurve], head: Sequence[LossCurve]) -> LossFinding:
    if len({curve.digest for curve in base}) > 1:
        step = _first_difference(base[0], next(c for c in base if c.digest != base[0].digest))
        return LossFinding(
            "inconclusive",
            f"repeats of the base are not bitwise equal ({step}), so no head can be held to it",
        )
    odd = next((curve for curve in head if curve.digest != base[0].digest), None)
    if odd is None:
        return LossFinding("equivalent", "", 0.0)
    return LossFinding("regressed", f"not bitwise equal: {_first_difference(base[0], odd)}", 0.0)


def _against_spread(
    base: Sequence[LossCurve], head: Sequence[LossCurve], tolerance: float
) -> LossFinding:
    repeats = [_distances(a, b) for a, b in itertools.combinations(base, 2)]
    spread = max((d for d, _ in repeats), default=None)
    area_spread = max((a for _, a in repeats), default=None)
    bound = max(tolerance, SPREAD_FACTOR * (spread or 0.0))
    area_bound = max(tolerance, SPREAD_FACTOR * (area_spread or 0.0))
    nearest = [min(base, key=lambda one: _distances(curve, one)) for curve in head]
    worst, reference = max(zip(head, nearest, strict=True), key=lambda pair: _distances(*pair))
    distance, area = _distances(worst, reference)
    reason = "the base has no repeats, so their spread is not known"
    if spread is not None:
        reason = f"repeats of the base spread by {quantity.difference(spread)} (n={len(base)})"
    if distance <= bound and area <= area_bound:
        return LossFinding("equivalent", reason, bound)
    step = _first_step(worst, reference, bound if distance > bound else area_bound)
    reason = (
        f"first divergent step {step}: curves differ by at most {quantity.difference(distance)} "
        f"(bound {bound:.1e}) and by {quantity.difference(area)} on average (bound "
        f"{area_bound:.1e}); {reason}"
    )
    return LossFinding("regressed", reason, bound)


def _distances(head: LossCurve, base: LossCurve) -> tuple[float, float]:
    """Largest and mean relative difference over the steps that both have."""
    found = _differences(head, base).values()
    return max(found), fmean(found)


def _first_step(head: LossCurve, base: LossCurve, bound: float) -> int | None:
    differences = _differences(head, base)
    return next((step for step, one in differences.items() if one > bound), None)


def _first_difference(base: LossCurve, other: LossCurve) -> str:
    step = _first_step(other, base, 0.0)
    if step is None:
        return "first divergent step among those that a baseline does not keep"
    return f"first divergent step {step}"


def _differences(head: LossCurve, base: LossCurve) -> dict[int, float]:
    """Relative difference at every common step; a baseline keeps some steps, the last always."""
    ours, theirs = (dict(zip(one.steps, one.values, strict=True)) for one in (head, base))
    steps = sorted(ours.keys() & theirs.keys())
    found = relative_differences([ours[s] for s in steps], [theirs[s] for s in steps])
    return dict(zip(steps, found, strict=True))
