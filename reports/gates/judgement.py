"""Verdicts: regressed, improved, equivalent, inconclusive, missed. Pure.

        1/(1+t)      1      1+t
    -------|---------+-------|---------->  ratio head / base of a metric where less is better
     [===]                                 improved:     interval wholly below the band
              [==========]                 equivalent:   interval wholly inside
                              [====]       regressed:    interval wholly above
           [=====================]         inconclusive: everything else

The band is the tolerance t, never narrower than the noise floor. The interval contains the changes
that the exact test does not reject; "wholly above" is the same as a small p-value of "the change
stays within the band", and those p-values are adjusted over all cells (Benjamini-Hochberg).

Where a policy asks for an improvement, its ratio stands in the place of 1 and the band is the noise
floor: improved is an interval wholly on the better side of it, missed one wholly on the other.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from statistics import median
from typing import Literal

from bench.derive.metrics import STEP_TIME, THROUGHPUT, Metric, MetricRule
from reports.renderers import quantity
from reports.statistics.estimate import (
    RatioEstimate,
    adjusted,
    estimate_paired,
    estimate_unpaired,
    smallest_deciding_n,
    smallest_p,
)
from reports.statistics.interval import MOST_EXACT

Verdict = Literal["regressed", "missed", "improved", "equivalent", "inconclusive", "unmeasured"]

_ROUNDING = 1e-12


@dataclass(frozen=True)
class Judgement:
    """One metric of one cell.

    base, head: medians in the metric's unit (ms, tokens/s, bytes, loss). ratio: head / base of the
    metric, for times the geometric mean over blocks. interval: of that ratio. tolerance: as it was
    used; None where an improvement was asked for and no noise is known. floor: whether the noise
    floor set it.
    time_ratio, throughput_ratio: of step time and of tokens/s, known for these two only.
    p_adjusted: of "within the tolerance", adjusted for `tests` cells.
    """

    cell: str
    metric: str
    verdict: Verdict
    required: bool
    reason: str = ""
    base: float | None = None
    head: float | None = None
    ratio: float | None = None
    interval: tuple[float, float] | None = None
    tolerance: float | None = None
    floor: bool = False
    n_base: int = 0
    n_head: int = 0
    paired: bool | None = None
    p_adjusted: float | None = None
    tests: int = 1
    time_ratio: float | None = None
    throughput_ratio: float | None = None
    detail: str = ""

    @property
    def change(self) -> float | None:
        """Relative change of the metric, head against base."""
        return None if self.ratio is None else self.ratio - 1


@dataclass(frozen=True)
class MetricSamples:
    """One metric of one cell: its number by block. paired: blocks were interleaved.

    tokens_ratio: tokens of a step, head / base.
    """

    cell: str
    base: Mapping[int, float]
    head: Mapping[int, float]
    paired: bool
    tolerance: float
    floor: bool = False
    tokens_ratio: float = 1.0

    @property
    def blocks(self) -> list[int]:
        """Blocks that both sides have."""
        return sorted(set(self.base) & set(self.head))

    @property
    def samples(self) -> tuple[list[float], list[float]]:
        """Base and head of every block."""
        return [self.base[block] for block in self.blocks], [self.head[b] for b in self.blocks]

    @property
    def why_no_ratio(self) -> str:
        """Processor time of a short step can come out at nothing."""
        for side, values in (("base", self.base.values()), ("head", self.head.values())):
            without = sum(value <= 0 for value in values)
            if without:
                return f"{without} of {len(values)} runs of the {side} measure nothing above zero"
        return ""


def unmeasured(cell: str, metric: Metric, rule: MetricRule, reason: str) -> Judgement:
    """A metric of which a side has no number."""
    required = rule.gate == "required"
    return Judgement(cell, metric.name, "unmeasured", required, reason)


def judge_intervals(
    cases: Sequence[MetricSamples], metric: Metric, rule: MetricRule, alpha: float
) -> list[Judgement]:
    """Judge a metric that varies from run to run, in all cells together.

    Args:
        cases: cells with at least one usable number on each side.
        metric: what the numbers are.
        rule: its part of the policy.
        alpha: two-sided, after adjustment for all of `cases`.
    """
    told = [case for case in cases if not case.why_no_ratio]
    estimates = [estimated(case, alpha) for case in told]
    beyond = [
        one.p_beyond(math.log1p(case.tolerance), math.log(rule.aim))
        for one, case in zip(estimates, told, strict=True)
    ]
    judged = iter(
        _interval_judgement(case, metric, rule, estimate, p=p, tests=len(told))
        for case, estimate, p in zip(told, estimates, adjusted(beyond), strict=True)
    )
    return [
        unmeasured(case.cell, metric, rule, case.why_no_ratio)
        if case.why_no_ratio
        else next(judged)
        for case in cases
    ]


def judge_values(
    cell: str,
    metric: Metric,
    rule: MetricRule,
    base: Sequence[float],
    head: Sequence[float],
    *,
    tolerance: float,
) -> Judgement:
    """Judge a metric that repeats almost exactly, from one run on each side or more.

    Where runs of one side differ among themselves by more than the sides do, it is not as
    deterministic as supposed, and nothing is concluded.
    """
    before, after = median(base), median(head)
    ratio = after / before if before else (1.0 if after == before else math.inf)
    change = (math.log(ratio) if ratio > 0 else -math.inf) - math.log(rule.aim)
    verdict: Verdict = "equivalent"
    reason = ""
    if abs(change) > math.log1p(tolerance) + _ROUNDING:
        verdict = direction_of(change > 0, rule)
        reason = _short_of(rule) if verdict == "missed" else ""
    elif rule.improve:
        verdict = "inconclusive" if tolerance else "improved"
        if tolerance:
            repeats = quantity.share(tolerance)
            reason = f"within the {repeats} to which this number repeats; {_short_of(rule)}"
    overlaps = min(max(base), max(head)) >= max(min(base), min(head))
    if overlaps and verdict not in ("equivalent", "inconclusive"):
        verdict = "inconclusive"
        reason = (
            f"runs of one side differ as much as the sides do: base {min(base):.6g} to "
            f"{max(base):.6g}, head {min(head):.6g} to {max(head):.6g}"
        )
    return Judgement(
        cell=cell,
        metric=metric.name,
        verdict=verdict,
        required=rule.gate == "required",
        reason=reason,
        base=before,
        head=after,
        ratio=ratio,
        tolerance=tolerance if tolerance or not rule.improve else None,
        n_base=len(base),
        n_head=len(head),
    )


def direction_of(up: bool, rule: MetricRule) -> Verdict:
    """What a change beyond the tolerance, or beyond the improvement that was asked for, means."""
    if rule.direction != "both" and up != (rule.direction == "lower_is_better"):
        return "improved"
    return "missed" if rule.improve else "regressed"


def _short_of(rule: MetricRule) -> str:
    return f"the policy asks for {quantity.share(rule.improve, 1)} better"


def estimated(case: MetricSamples, alpha: float) -> RatioEstimate:
    """The ratio of the metric, head over base: paired where both sides have blocks in turn."""
    if case.paired and case.blocks:
        return estimate_paired(*case.samples, alpha)
    return estimate_unpaired(list(case.base.values()), list(case.head.values()), alpha)


def _interval_judgement(
    case: MetricSamples,
    metric: Metric,
    rule: MetricRule,
    estimate: RatioEstimate,
    *,
    p: float,
    tests: int,
) -> Judgement:
    band, interval = math.log1p(case.tolerance), estimate.interval
    verdict: Verdict = "inconclusive"
    if interval is not None and p <= estimate.alpha:
        verdict = direction_of(estimate.log_ratio > math.log(rule.aim), rule)
    elif not rule.improve and interval is not None and -band <= interval[0] and interval[1] <= band:
        verdict = "equivalent"
    ratio, mirrored = estimate.ratio, case.tokens_ratio / estimate.ratio
    speeds = {STEP_TIME.name: (ratio, mirrored), THROUGHPUT.name: (mirrored, ratio)}
    time_ratio, throughput_ratio = speeds.get(metric.name, (None, None))
    return Judgement(
        cell=case.cell,
        metric=metric.name,
        verdict=verdict,
        required=rule.gate == "required",
        reason=_why(verdict, case, rule, estimate, p=p, tests=tests),
        base=math.exp(median(estimate.base)),
        head=math.exp(median(estimate.head)),
        ratio=ratio,
        interval=None if interval is None else (math.exp(interval[0]), math.exp(interval[1])),
        tolerance=case.tolerance if case.tolerance or not rule.improve else None,
        floor=case.floor,
        n_base=len(estimate.base),
        n_head=len(estimate.head),
        paired=estimate.paired,
        p_adjusted=p,
        tests=tests,
        time_ratio=time_ratio,
        throughput_ratio=throughput_ratio,
    )


def _why(
    verdict: Verdict,
    case: MetricSamples,
    rule: MetricRule,
    estimate: RatioEstimate,
    *,
    p: float,
    tests: int,
) -> str:
    """Why nothing was concluded, and what would help; empty where the verdict says all."""
    if verdict == "missed":
        return _short_of(rule)
    if verdict != "inconclusive":
        return ""
    alpha, interval = estimate.alpha, estimate.interval
    needed = smallest_deciding_n(alpha, paired=estimate.paired, tests=tests)
    unit = "blocks" if estimate.paired else "runs on each side"
    least = f"at least {needed} {unit}" + (f" (for {tests} cells)" if tests > 1 else "")
    least_p = smallest_p(needed, needed, paired=estimate.paired)
    never = least_p < Fraction(2, MOST_EXACT)
    if never:
        least = (
            f"no number of {unit} decides at {alpha:g} for {quantity.counted(tests, 'cell')}: take"
            " a larger alpha" + (", or judge fewer cells with --only" if tests > 1 else "")
        )
    if interval is None:
        have = (
            quantity.counted(estimate.n, "block")
            if estimate.paired
            else f"{len(estimate.head)} against {len(estimate.base)} runs"
        )
        return (
            f"cannot decide with {have}: the smallest p-value that is possible is "
            f"{estimate.smallest_p:.2g}, and {alpha:g} is asked for; {least}"
        )
    low, high = (quantity.change(x - 1) for x in (math.exp(interval[0]), math.exp(interval[1])))
    if rule.improve:
        noise = f", give or take {quantity.share(case.tolerance)} of noise" if case.floor else ""
        return f"the interval {low} to {high} holds what was asked for{noise}; {_short_of(rule)}"
    band = math.log1p(case.tolerance)
    if interval[0] > band or interval[1] < -band:
        more = "" if estimate.n >= needed and not never else f"; {least}"
        return (
            f"the interval {low} to {high} is beyond the tolerance, but not after adjustment for "
            f"{tests} cells (p {p:.3g}){more}"
        )
    return (
        f"the interval {low} to {high} is neither inside nor beyond the tolerance of "
        f"{quantity.share(case.tolerance)}; more {unit} narrow it"
    )
