"""Is the change still right? Losses and gradient norms of head against those of base. Pure.

Bitwise: every value of every run is the same number. Otherwise two distances are measured
(`parity.Distances`), and each is set against the spread of repeats of the base: runs of one
configuration and one code.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from bench.derive.metrics import LossMode
from reports.comparisons.parity import LOSSES, Distances, relative_differences
from reports.gates.cell_samples import Curve
from reports.gates.judgement import Verdict
from reports.renderers import quantity

SPREAD_FACTOR = 3.0
"""A head curve may be this many times as far away as the two most distant repeats of the base."""


@dataclass(frozen=True)
class CurveFinding:
    """The head run that is farthest from the base.

    bound: what the first distance from the nearest base run may reach, None where there is none.
    """

    verdict: Verdict
    reason: str
    bound: float | None = None


def judge_curve(
    base: Sequence[Curve],
    head: Sequence[Curve],
    mode: LossMode,
    bounds: tuple[float, float],
    distances: Distances = LOSSES,
) -> CurveFinding:
    """Compare all head runs with all base runs (at least one on each side).

    Args:
        base: runs of the reference.
        head: runs to judge.
        mode: bitwise, or against the spread of the base.
        bounds: distances that are accepted even if the repeats agree better.
        distances: what is measured between two curves.
    """
    lengths = {curve.steps[-1] if curve.steps else 0 for curve in (*base, *head)}
    if len(lengths) > 1 or 0 in lengths:
        found = ", ".join(map(str, sorted(lengths)))
        return CurveFinding("regressed", f"the runs have different numbers of steps: {found}")
    known = set.intersection(*(set(curve.steps) for curve in base))
    kept = set.intersection(*(set(curve.steps) for curve in head))
    lacking = sorted(known - kept)
    if lacking:
        count = quantity.counted(len(lacking), "step")
        return CurveFinding(
            "regressed", f"the head has no value at {count} of the base, first at {lacking[0]}"
        )
    if mode == "bitwise":
        return _bitwise(base, head)
    return _against_spread(base, head, bounds, distances)


def _bitwise(base: Sequence[Curve], head: Sequence[Curve]) -> CurveFinding:
    if len({curve.digest for curve in base}) > 1:
        step = _first_difference(base[0], next(c for c in base if c.digest != base[0].digest))
        return CurveFinding(
            "inconclusive",
            f"repeats of the base are not bitwise equal ({step}), so no head can be held to it",
        )
    odd = next((curve for curve in head if curve.digest != base[0].digest), None)
    if odd is None:
        return CurveFinding("equivalent", "", 0.0)
    return CurveFinding("regressed", f"not bitwise equal: {_first_difference(base[0], odd)}", 0.0)


def _against_spread(
    base: Sequence[Curve],
    head: Sequence[Curve],
    accepted: tuple[float, float],
    distances: Distances,
) -> CurveFinding:
    def apart(one: Curve, other: Curve) -> tuple[float, float]:
        return distances.of([*_differences(one, other).values()])

    repeats = [apart(a, b) for a, b in itertools.combinations(base, 2)]
    spread = [max((one[i] for one in repeats), default=0.0) for i in range(2)]
    bounds = [max(one, SPREAD_FACTOR * far) for one, far in zip(accepted, spread, strict=True)]
    nearest = [min(base, key=lambda one: apart(curve, one)) for curve in head]
    worst, reference = max(zip(head, nearest, strict=True), key=lambda pair: apart(*pair))
    found = apart(worst, reference)
    reason = "the base has no repeats, so their spread is not known"
    if repeats:
        reason = f"repeats of the base spread by {quantity.difference(spread[0])} (n={len(base)})"
    if found[0] <= bounds[0] and found[1] <= bounds[1]:
        return CurveFinding("equivalent", reason, bounds[0])
    step = _first_step(worst, reference, bounds[0] if found[0] > bounds[0] else bounds[1])
    by = " and by ".join(
        f"{quantity.difference(one)} {word} (bound {bound:.1e})"
        for one, word, bound in zip(found, distances.words, bounds, strict=True)
    )
    reason = f"first divergent step {step}: curves differ by {by}; {reason}"
    return CurveFinding("regressed", reason, bounds[0])


def _first_step(head: Curve, base: Curve, bound: float) -> int | None:
    differences = _differences(head, base)
    return next((step for step, one in differences.items() if one > bound), None)


def _first_difference(base: Curve, other: Curve) -> str:
    step = _first_step(other, base, 0.0)
    if step is None:
        return "first divergent step among those that a baseline does not keep"
    return f"first divergent step {step}"


def _differences(head: Curve, base: Curve) -> dict[int, float]:
    """Relative difference at every common step; a baseline keeps some steps, the last always."""
    ours, theirs = (dict(zip(one.steps, one.values, strict=True)) for one in (head, base))
    steps = sorted(ours.keys() & theirs.keys())
    found = relative_differences([ours[s] for s in steps], [theirs[s] for s in steps])
    return dict(zip(steps, found, strict=True))
