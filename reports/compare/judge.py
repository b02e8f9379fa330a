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

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from statistics import median
from typing import Literal

from bench.derive.counts import COUNTED
from bench.derive.hardware import STATED, HardwareKey
from bench.derive.live_storage import risen
from bench.derive.metrics import (
    GRAD_NORM,
    JUDGED_IF_MEASURED,
    LIVE_STORAGE,
    LOSS,
    STEP_TIME,
    THROUGHPUT,
    LossMode,
    Metric,
    MetricRule,
    judged_metrics,
)
from reports.compare.counts import MOST_NAMED, rises, size_text, unused, why_risen
from reports.compare.noise import NoiseCalibration
from reports.compare.parity import LOSSES, NORMS, Distances, relative_differences
from reports.compare.policy import AllowedRise, Policy
from reports.compare.samples import CellSamples, Curve, shared_metric
from reports.compare.sides import Pair, Sides
from reports.compare.statistics import (
    MOST_EXACT,
    RatioEstimate,
    adjusted,
    estimate_paired,
    estimate_unpaired,
    smallest_deciding_n,
    smallest_p,
)
from reports.compare.unlike import NumberChange, comparable_rates, norm_without_loss, text_of
from reports.renderers import quantity

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

    @property
    def title(self) -> str:
        """The metric, and which one of its kind."""
        return f"{self.metric} ({self.detail})" if self.detail else self.metric

    @property
    def is_speed(self) -> bool:
        """Whether time change, throughput change and ratio are known of it."""
        return self.metric in (STEP_TIME.name, THROUGHPUT.name)

    @property
    def is_count(self) -> bool:
        """Whether it is of what a step does, which is judged exactly."""
        return judged_metrics()[self.metric].judge == "count"

    @property
    def is_equal_count(self) -> bool:
        """A count that is the same on both sides."""
        return self.is_count and self.verdict == "equivalent"


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


_MOST_HOLDERS = 3
Calibrations = Callable[[HardwareKey], NoiseCalibration | None]


@dataclass(frozen=True)
class Verdicts:
    """Everything a gate found. `sides.not_comparable` grows by the cells that are too unlike.

    rates: (cell, rate) of those, where a rate compares all the same.
    """

    sides: Sides
    policy: Policy
    judgements: tuple[Judgement, ...]
    calibration: NoiseCalibration | None
    notes: tuple[str, ...] = ()
    rates: tuple[tuple[str, NumberChange], ...] = ()

    def of(self, verdict: str, *, required: bool = True) -> list[Judgement]:
        """Judgements with this verdict."""
        return [j for j in self.judgements if j.verdict == verdict and j.required == required]

    def of_metric(self, name: str) -> list[Judgement]:
        """Its judgements, a cell each."""
        return [one for one in self.judgements if one.metric == name]

    @property
    def regressed(self) -> bool:
        """A required metric is worse beyond its tolerance, or not as much better as was asked."""
        return bool(self.worse)

    @property
    def worse(self) -> list[Judgement]:
        """Judgements that fail the gate."""
        return self.of("regressed") + self.of("missed")

    @property
    def undecided(self) -> bool:
        """A required metric is neither better, worse nor equal as far as can be told."""
        return bool(self.of("inconclusive"))

    @property
    def failed(self) -> bool:
        """A cell gave no number, or a metric that is asked for was measured nowhere."""
        return bool(self.sides.failed) or bool(self.of("unmeasured"))

    @property
    def nothing_comparable(self) -> bool:
        """No pair of cells could be compared."""
        return not self.sides.pairs

    @property
    def passed(self) -> bool:
        """Every required metric is equal or better."""
        clean = not (self.regressed or self.undecided or self.failed)
        return clean and not self.nothing_comparable


def judge(
    sides: Sides,
    policy: Policy | None = None,
    calibrations: Calibrations = lambda _: None,
    *,
    any_nodes: bool = False,
) -> Verdicts:
    """Judge `sides` by `policy`.

    Args:
        sides: what to compare.
        policy: tolerances and requirements; None is the default one.
        calibrations: the noise calibration of a kind of hardware, None if there is none.
        any_nodes: compare what different nodes of a cluster have measured.
    """
    policy = policy or Policy()
    unlike = [pair for pair in sides.pairs if pair.unlike]
    sides = _only_comparable(sides, any_nodes=any_nodes)
    calibration = calibrations(sides.pairs[0].head.hardware) if sides.pairs else None
    judgements: list[Judgement] = []
    for metric, rule in policy.active():
        pairs = [pair for pair in sides.pairs if rule.named or _is_asked(metric, pair)]
        if metric.judge == "interval":
            judgements += _intervals(pairs, metric, rule, policy.alpha, calibrations)
        elif metric.judge == "count":
            judgements += [judge_count(pair, metric, rule, policy.allowed) for pair in pairs]
        elif metric.judge == "curve":
            judgements += [_curve(pair, metric, rule) for pair in pairs]
        else:
            judgements += [_ratio(pair, metric, rule) for pair in pairs]
    order = {pair.label: index for index, pair in enumerate(sides.pairs)}
    judgements.sort(key=lambda judgement: order[judgement.cell])
    return Verdicts(
        sides=sides,
        policy=policy,
        judgements=tuple(_passed_over(judgements, policy)),
        calibration=calibration,
        notes=(
            *sides.notes,
            *unused(policy.allowed, [(one.base.counts, one.head.counts) for one in sides.pairs]),
        ),
        rates=tuple(
            (pair.label, rate)
            for pair in unlike
            for rate in comparable_rates(pair.unlike, pair.base.pace, pair.head.pace)
        ),
    )


def _is_asked(metric: Metric, pair: Pair) -> bool:
    if metric.judge == "curve":
        return any(has_curve(side, metric) for side in (pair.base, pair.head))
    return metric not in JUDGED_IF_MEASURED or bool(pair.base.of(metric) or pair.head.of(metric))


def judge_count(
    pair: Pair, metric: Metric, rule: MetricRule, allowed: Sequence[AllowedRise]
) -> Judgement:
    """One count of one cell."""
    base, head = pair.base, pair.head
    before, after = list(base.of(metric).values()), list(head.of(metric).values())
    if not before or not after or base.counts is None or head.counts is None:
        side = "base" if not before else "head"
        why = f"{side} has no counts; run it with `--set measure.counts=true`"
        return unmeasured(pair.label, metric, rule, why)
    risen_names = rises(base.counts, head.counts, COUNTED[metric.name][1], allowed)
    waived = sum(rise.allowed for rise in risen_names)
    lowered = [value - waived for value in after]
    judged = judge_values(pair.label, metric, rule, before, lowered, tolerance=0.0)
    judged = replace(judged, head=judged.head + waived if judged.head is not None else None)
    if not judged.base:  # nothing before: no ratio
        judged = replace(judged, ratio=None)
    unsteady = ", ".join(sorted({*base.counts.varying, *head.counts.varying})[:MOST_NAMED])
    if judged.verdict == "regressed" and unsteady:
        why = f"no two counted steps in a row agree about {unsteady}"
        return replace(judged, verdict="inconclusive", reason=why)
    if judged.verdict == "regressed":
        return replace(
            judged, reason=why_risen(metric, risen_names, base.counts, head.counts, allowed)
        )
    notes = [
        f"{size_text(metric, rise.allowed)} of {rise.name} allowed ({rise.reason})"
        for rise in risen_names
        if rise.allowed
    ]
    return replace(judged, reason="; ".join([judged.reason, *notes]).removeprefix("; "))


def has_curve(side: CellSamples, metric: Metric) -> bool:
    """Whether a run of it has the metric at any step."""
    return any(curve.values for curve in side.curves.get(metric.name, ()))


def incomparable(base: CellSamples, head: CellSamples, *, any_nodes: bool = False) -> str:
    """Why two cells may not be compared; empty if they may."""
    if base.schema_version != head.schema_version:
        return f"schema versions differ: {base.schema_version} and {head.schema_version}"
    stated = STATED in (base.hardware.kind, head.hardware.kind)
    if base.hardware != head.hardware and not stated:
        ours, theirs = base.hardware.describe(), head.hardware.describe()
        if ours == theirs:
            ours, theirs = base.hardware.slug, head.hardware.slug
        return f"hardware differs: {ours} and {theirs}"
    if base.nodes and head.nodes and base.nodes != head.nodes and not any_nodes:
        ours, theirs = (", ".join(sorted(side.nodes)) for side in (base, head))
        return f"nodes differ: {ours} and {theirs} (--any-nodes compares them all the same)"
    return ""


def _only_comparable(sides: Sides, *, any_nodes: bool) -> Sides:
    reasons = [
        (
            pair,
            text_of(pair.unlike) or incomparable(pair.base, pair.head, any_nodes=any_nodes),
        )
        for pair in sides.pairs
    ]
    refused = tuple((pair.label, why) for pair, why in reasons if why)
    return replace(
        sides,
        pairs=tuple(pair for pair, why in reasons if not why),
        not_comparable=sides.not_comparable + refused,
    )


def _intervals(
    pairs: Sequence[Pair],
    metric: Metric,
    rule: MetricRule,
    alpha: float,
    calibrations: Calibrations,
) -> list[Judgement]:
    cases, without = [], []
    for pair in pairs:
        case = case_of(pair, metric, rule, calibrations)
        usable = case.blocks if case.paired else case.base and case.head
        if usable:
            cases.append(case)
        else:
            counts = f"{pair.base.not_steady} base and {pair.head.not_steady} head runs"
            why = f"no steady time to compare ({counts} are not steady or not comparable in time)"
            reasons = dict.fromkeys((*pair.base.why_not_steady, *pair.head.why_not_steady))
            why += f": {next(iter(reasons))}" if reasons else ""
            without.append(unmeasured(pair.label, metric, rule, why))
    return judge_intervals(cases, metric, rule, alpha) + without


def case_of(
    pair: Pair, metric: Metric, rule: MetricRule, calibrations: Calibrations
) -> MetricSamples:
    """One metric of `pair` as it is to be judged: its numbers, and the tolerance that counts."""
    calibration = calibrations(pair.head.hardware)
    floor = calibration.floor(pair.head.config_hash, metric) if calibration else 0.0
    asked = _asked_tolerance(rule, metric)
    return MetricSamples(
        cell=pair.label,
        base=pair.base.of(metric),
        head=pair.head.of(metric),
        paired=pair.paired,
        tolerance=max(asked, floor),
        floor=floor > asked,
        tokens_ratio=pair.head.tokens_per_step / pair.base.tokens_per_step,
    )


def _asked_tolerance(rule: MetricRule, metric: Metric) -> float:
    """That of the policy; an improvement stands in its place, and not in that of the metric's."""
    return max(0.0 if rule.improve else rule.tolerance or 0.0, metric.least_tolerance)


def _ratio(pair: Pair, metric: Metric, rule: MetricRule) -> Judgement:
    found = shared_metric(metric, pair.base, pair.head)
    if found is None:
        why = f"no {metric.title} number that both sides have"
        return unmeasured(pair.label, metric, rule, why)
    judged = judge_values(
        pair.label,
        metric,
        rule,
        list(pair.base.of(found).values()),
        list(pair.head.of(found).values()),
        tolerance=_asked_tolerance(rule, found),
    )
    if judged.verdict == "regressed" and metric is LIVE_STORAGE:
        judged = replace(judged, reason=_largest_growth(pair))
    return judged if found is metric else replace(judged, detail=found.title)


def _largest_growth(pair: Pair) -> str:
    """`+1.0 MiB in 4 storages of a.py:f line 12`, over all ranks; empty where nobody has said."""
    if pair.base.live is None or pair.head.live is None:
        return ""
    texts = [
        f"+{quantity.binary_bytes(more)} from {row.site or 'outside of operations'} line {row.line}"
        for row, more in risen(pair.base.live, pair.head.live)[:_MOST_HOLDERS]
    ]
    return f"over all ranks {', '.join(texts)}" if texts else ""


def _curve(pair: Pair, metric: Metric, rule: MetricRule) -> Judgement:
    if not has_curve(pair.base, metric):
        return unmeasured(pair.label, metric, rule, f"no {metric.title} of the base")
    base, head = (side.curves[metric.name] for side in (pair.base, pair.head))
    if not head:
        return unmeasured(pair.label, metric, rule, f"no {metric.title} of the head")
    distances = NORMS if metric is GRAD_NORM else LOSSES
    bounds = distances.bounds(pair.head.loss_bound)
    if rule.tolerance is not None:
        bounds = (rule.tolerance, rule.tolerance)
    found = judge_curve(base, head, rule.mode, bounds, distances)
    before, after = (side[0].values[-1:] for side in (base, head))
    reason = found.reason
    if metric is GRAD_NORM and found.verdict == "regressed":
        reason = "; ".join(filter(None, (reason, _norm_without_loss(pair))))
    change = (after[0] - before[0]) / abs(before[0]) if before and after and before[0] else None
    return Judgement(
        cell=pair.label,
        metric=metric.name,
        verdict=found.verdict,
        required=rule.gate == "required",
        reason=reason,
        base=before[0] if before else None,
        head=after[0] if after else None,
        ratio=None if change is None else 1 + change,
        tolerance=found.bound,
        n_base=len(base),
        n_head=len(head),
        detail=rule.mode,
    )


def _norm_without_loss(pair: Pair) -> str:
    losses, norms = (
        [dict(zip(side.curves[name][0].steps, side.curves[name][0].values, strict=True))
         for side in (pair.base, pair.head)]
        for name in (LOSS.name, GRAD_NORM.name)
    )  # fmt: skip
    ranks = pair.head.workload.ranks if pair.head.workload else None
    return norm_without_loss((losses[0], losses[1]), (norms[0], norms[1]), ranks)


def _passed_over(judgements: Sequence[Judgement], policy: Policy) -> list[Judgement]:
    """Decide what a missing number means.

    A metric that nobody asked for by name is passed over (`single` sends no bytes). Time, and what
    the policy names, must be there: where other cells have it the cell is undecided, and where no
    cell has it nothing was measured.
    """
    found = []
    for judgement in judgements:
        rule = policy.rules[judgement.metric]
        asked = rule.named or judgement.metric == STEP_TIME.name
        if judgement.verdict != "unmeasured" or not judgement.required:
            found.append(judgement)
        elif not asked:
            found.append(replace(judgement, required=False))
        elif any(j.metric == judgement.metric and j.verdict != "unmeasured" for j in judgements):
            found.append(replace(judgement, verdict="inconclusive"))
        else:
            found.append(judgement)
    return found
