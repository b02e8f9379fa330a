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
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from statistics import median
from typing import Any, Final, Literal, NamedTuple

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
from reports.compare.policy import Policy
from reports.compare.samples import CellSamples, shared_metric
from reports.compare.series import LOSSES, NORMS, Curve, Distances, Gap, relative
from reports.compare.sides import Pair, Sides
from reports.compare.statistics import (
    MOST_EXACT,
    RatioEstimate,
    adjusted,
    estimate,
    smallest_deciding_n,
    smallest_p,
)
from reports.compare.unlike import NumberChange, comparable_rates, norm_without_loss, text_of
from reports.renderers import quantity

Verdict = Literal["regressed", "missed", "improved", "equivalent", "inconclusive", "unmeasured"]
WORSE: Final = ("regressed", "missed")
Outcome = Literal["failed", "regressed", "not comparable", "undecided", "passed"]
Calibrations = Callable[[HardwareKey], NoiseCalibration | None]

SPREAD_FACTOR = 3.0
"""A head curve may be this many times as far away as the two most distant repeats of the base."""

_ROUNDING = 1e-12
_MOST_HOLDERS = 3


@dataclass(frozen=True)
class Judgement:
    """One metric of one cell.

    base, head: medians in the metric's unit (ms, tokens/s, bytes, loss). ratio: head / base of the
    metric, for times the geometric mean over blocks. interval: of that ratio. tolerance: as it was
    used; None where an improvement was requested and no noise is known. floor: whether the noise
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


@dataclass(frozen=True, eq=False)
class Verdicts:
    """All judgements of two sides. `sides.not_comparable` grows by the cells that are too unlike.

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
        return [row for row in self.judgements if row.metric == name]

    @property
    def worse(self) -> list[Judgement]:
        """Judgements that fail the gate."""
        return [row for verdict in WORSE for row in self.of(verdict)]

    @property
    def regressed(self) -> bool:
        """A required metric is worse beyond its tolerance, or not as much better as requested."""
        return bool(self.worse)

    @property
    def undecided(self) -> bool:
        """A required metric is neither better, worse nor equal as far as can be known."""
        return bool(self.of("inconclusive"))

    @property
    def failed(self) -> bool:
        """A cell gave no number, or a metric that is requested was measured nowhere."""
        return bool(self.sides.failed) or bool(self.of("unmeasured"))

    @property
    def nothing_comparable(self) -> bool:
        """No pair of cells could be compared."""
        return not self.sides.pairs

    @property
    def outcome(self) -> Outcome:
        """The one that stands of all that apply; passed: each required metric equal or better."""
        applies: dict[Outcome, bool] = {
            "failed": self.failed,
            "regressed": self.regressed,
            "not comparable": self.nothing_comparable,
            "undecided": self.undecided,
        }
        return next((outcome for outcome, is_so in applies.items() if is_so), "passed")


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
    reasons = [
        (pair, text_of(pair.unlike) or _other_machine(pair.base, pair.head, any_nodes=any_nodes))
        for pair in sides.pairs
    ]
    pairs = tuple(pair for pair, why in reasons if not why)
    incomparable = [(pair.label, why) for pair, why in reasons if why]
    judgements: list[Judgement] = []
    for metric, rule in policy.active():
        judged = [pair for pair in pairs if rule.named or _is_measured(metric, pair)]
        if metric.judge == "interval":
            judgements += judge_intervals(judged, metric, rule, policy.alpha, calibrations)
        else:
            judge_one = _JUDGES[str(metric.judge)]
            judgements += [judge_one(pair, metric, rule, policy) for pair in judged]
    order = {pair.label: index for index, pair in enumerate(pairs)}
    judgements.sort(key=lambda judgement: order[judgement.cell])
    counts = [(pair.base.counts, pair.head.counts) for pair in pairs]
    return Verdicts(
        sides=replace(sides, pairs=pairs, not_comparable=(*sides.not_comparable, *incomparable)),
        policy=policy,
        judgements=tuple(
            _with_missing_numbers(judgements, policy, _without_times(pairs, judgements))
        ),
        calibration=calibrations(pairs[0].head.hardware) if pairs else None,
        notes=(*sides.notes, *unused(policy.allowed, counts)),
        rates=tuple(
            (pair.label, rate)
            for pair in sides.pairs
            if pair.unlike
            for rate in comparable_rates(pair.unlike, pair.base.pace, pair.head.pace)
        ),
    )


def _is_measured(metric: Metric, pair: Pair) -> bool:
    """Whether either side has it; what is always requested counts as measured."""
    if metric.judge == "curve":
        return _has_curve(pair.base, metric) or _has_curve(pair.head, metric)
    return metric not in JUDGED_IF_MEASURED or bool(pair.base.of(metric) or pair.head.of(metric))


def _has_curve(side: CellSamples, metric: Metric) -> bool:
    return any(curve.values for curve in side.curves.get(metric.name, ()))


def _other_machine(base: CellSamples, head: CellSamples, *, any_nodes: bool) -> str:
    """In what machines or records differ so that cells may not be compared; empty if in nothing."""
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


def _without_times(pairs: Sequence[Pair], judgements: Sequence[Judgement]) -> set[str]:
    """Cells of logs of which neither states a step time, and something required is decided."""
    known = {row.cell for row in judgements if row.required and row.verdict != "unmeasured"}
    return {p.label for p in pairs if not (p.base.is_timed or p.head.is_timed)} & known


def _with_missing_numbers(
    judgements: Sequence[Judgement], policy: Policy, without_times: Collection[str]
) -> list[Judgement]:
    """Decide what a missing number means.

    A metric that nobody requested by name is passed over (`single` sends no bytes). Time (but in
    cells `without_times`) and what the policy names must be there: where other cells have it the
    cell is undecided, and where no cell has it nothing was measured.
    """
    known = {row.metric for row in judgements if row.verdict != "unmeasured"}

    def decided(row: Judgement) -> Judgement:
        if row.verdict != "unmeasured" or not row.required:
            return row
        is_time = row.metric == STEP_TIME.name and row.cell not in without_times
        if not (policy.rules[row.metric].named or is_time):
            return replace(row, required=False)
        return replace(row, verdict="inconclusive") if row.metric in known else row

    return [*map(decided, judgements)]


def _judgement(
    pair: Pair, metric: Metric, rule: MetricRule, verdict: Verdict, reason: str = "", **numbers: Any
) -> Judgement:
    """numbers: by the names of the fields."""
    required = rule.gate == "required"
    return Judgement(pair.label, metric.name, verdict, required, reason, **numbers)


def _direction(up: bool, rule: MetricRule) -> Verdict:
    """What a change beyond the tolerance, or beyond the improvement that was requested, means."""
    if rule.direction != "both" and up != (rule.direction == "lower_is_better"):
        return "improved"
    return "missed" if rule.improve else "regressed"


def _short_of(rule: MetricRule) -> str:
    return f"the policy asks for {quantity.share(rule.improve, 1)} better"


def _policy_tolerance(rule: MetricRule, metric: Metric) -> float:
    """That of the policy; an improvement stands in its place, and not in that of the metric's."""
    return max(0.0 if rule.improve else rule.tolerance or 0.0, metric.least_tolerance)


# Kind "interval": what varies from run to run.


def judge_intervals(
    pairs: Sequence[Pair],
    metric: Metric,
    rule: MetricRule,
    alpha: float,
    calibrations: Calibrations = lambda _: None,
) -> list[Judgement]:
    """Judge a metric that varies from run to run, in all cells together.

    alpha: two-sided, after adjustment for all of `pairs` that have a ratio.
    """
    reasons = [(pair, _why_no_ratio(pair, metric)) for pair in pairs]
    usable: list[tuple[Pair, RatioEstimate, float]] = []
    for pair in (pair for pair, why in reasons if not why):
        calibration = calibrations(pair.head.hardware)
        floor = calibration.floor(pair.head.config_hash, metric) if calibration else 0.0
        ratio = estimate(*pair.of(metric), alpha, paired=pair.paired)
        usable.append((pair, ratio, max(_policy_tolerance(rule, metric), floor)))
    aim = math.log(rule.aim)
    p_values = adjusted([ratio.p_beyond(math.log1p(most), aim) for _, ratio, most in usable])
    judged = (
        _of_interval(pair, metric, rule, ratio, _Test(tolerance, p, len(usable)))
        for (pair, ratio, tolerance), p in zip(usable, p_values, strict=True)
    )
    return [
        _judgement(pair, metric, rule, "unmeasured", why) if why else next(judged)
        for pair, why in reasons
    ]


def _why_no_ratio(pair: Pair, metric: Metric) -> str:
    """A side without a usable number, or with one of nothing: the processor time of a short step.

    Empty if there is a ratio.
    """
    if not all(pair.of(metric)):
        if not (pair.base.is_timed or pair.head.is_timed):
            return f"neither side states a {metric.title}"
        counts = f"{pair.base.not_steady} base and {pair.head.not_steady} head runs"
        why = f"no steady time to compare ({counts} are not steady or not comparable in time)"
        reasons = (*pair.base.why_not_steady, *pair.head.why_not_steady)
        return why + (f": {reasons[0]}" if reasons else "")
    for name, side in (("base", pair.base), ("head", pair.head)):
        values = side.of(metric).values()
        if without := sum(value <= 0 for value in values):
            return f"{without} of {len(values)} runs of the {name} measure nothing above zero"
    return ""


class _Test(NamedTuple):
    """How one ratio is tested. p: adjusted for as many cells as there are `tests`."""

    tolerance: float
    p: float
    tests: int


def _of_interval(
    pair: Pair, metric: Metric, rule: MetricRule, estimate: RatioEstimate, test: _Test
) -> Judgement:
    tolerance, p, tests = test
    band, interval = math.log1p(tolerance), estimate.interval
    floor = tolerance > _policy_tolerance(rule, metric)
    verdict: Verdict = "inconclusive"
    if interval is not None and p <= estimate.alpha:
        verdict = _direction(estimate.log_ratio > math.log(rule.aim), rule)
    elif not rule.improve and interval is not None and -band <= interval[0] and interval[1] <= band:
        verdict = "equivalent"
    reason = _short_of(rule) if verdict == "missed" else ""
    if verdict == "inconclusive":
        noise = f", give or take {quantity.share(tolerance)} of noise" if floor else ""
        reason = _why_open(estimate, rule, test, noise)
    before, after = pair.base.tokens_per_step, pair.head.tokens_per_step
    # What a side does not say is no difference.
    mirrored = (after / before if before and after else 1.0) / estimate.ratio
    speeds = {
        STEP_TIME.name: (estimate.ratio, mirrored),
        THROUGHPUT.name: (mirrored, estimate.ratio),
    }
    time_ratio, throughput_ratio = speeds.get(metric.name, (None, None))
    return _judgement(
        pair, metric, rule, verdict, reason,
        base=math.exp(median(estimate.base)),
        head=math.exp(median(estimate.head)),
        ratio=estimate.ratio,
        interval=None if interval is None else (math.exp(interval[0]), math.exp(interval[1])),
        tolerance=tolerance if tolerance or not rule.improve else None,
        floor=floor,
        n_base=len(estimate.base),
        n_head=len(estimate.head),
        paired=estimate.paired,
        p_adjusted=p,
        tests=tests,
        time_ratio=time_ratio,
        throughput_ratio=throughput_ratio,
    )  # fmt: skip


def _why_open(estimate: RatioEstimate, rule: MetricRule, test: _Test, noise: str) -> str:
    """Why nothing was concluded, and what would help."""
    tolerance, p, tests = test
    alpha, interval = estimate.alpha, estimate.interval
    needed = smallest_deciding_n(alpha, paired=estimate.paired, tests=tests)
    unit = "blocks" if estimate.paired else "runs on each side"
    least = f"at least {needed} {unit}" + (f" (for {tests} cells)" if tests > 1 else "")
    never = smallest_p(needed, needed, paired=estimate.paired) < Fraction(2, MOST_EXACT)
    if never:
        least = (
            f"no number of {unit} decides at {alpha:g} for {quantity.counted(tests, 'cell')}: take"
            " a larger alpha" + (", or judge fewer cells with --only" if tests > 1 else "")
        )
    if interval is None:
        have = f"{len(estimate.head)} against {len(estimate.base)} runs"
        have = quantity.counted(estimate.n, "block") if estimate.paired else have
        return (
            f"cannot decide with {have}: the smallest p-value that is possible is "
            f"{estimate.smallest_p:.2g}, and {alpha:g} is needed; {least}"
        )
    low, high = (quantity.change(math.exp(end) - 1) for end in interval)
    if rule.improve:
        return f"the interval {low} to {high} holds what was requested{noise}; {_short_of(rule)}"
    band = math.log1p(tolerance)
    if interval[0] > band or interval[1] < -band:
        more = "" if estimate.n >= needed and not never else f"; {least}"
        return (
            f"the interval {low} to {high} is beyond the tolerance, but not after adjustment for "
            f"{tests} cells (p {p:.3g}){more}"
        )
    return (
        f"the interval {low} to {high} is neither inside nor beyond the tolerance of "
        f"{quantity.share(tolerance)}; more {unit} narrow it"
    )


# Kinds "ratio" and "count": what repeats almost exactly, or exactly.


def judge_values(
    pair: Pair,
    metric: Metric,
    rule: MetricRule,
    values: tuple[Sequence[float], Sequence[float]],
    tolerance: float,
) -> Judgement:
    """Judge a metric that repeats almost exactly, from one run on each side or more.

    Where runs of one side differ among themselves by more than the sides do, it is not as
    deterministic as supposed, and nothing is concluded.
    """
    base, head = values
    before, after = median(base), median(head)
    ratio = after / before if before else (1.0 if after == before else math.inf)
    change = (math.log(ratio) if ratio > 0 else -math.inf) - math.log(rule.aim)
    verdict: Verdict = "equivalent"
    reason = ""
    if abs(change) > math.log1p(tolerance) + _ROUNDING:
        verdict = _direction(change > 0, rule)
        reason = _short_of(rule) if verdict == "missed" else ""
    elif rule.improve:
        verdict = "inconclusive" if tolerance else "improved"
        repeats = f"within the {quantity.share(tolerance)} to which this number repeats"
        reason = f"{repeats}; {_short_of(rule)}" if tolerance else ""
    overlaps = min(max(base), max(head)) >= max(min(base), min(head))
    if overlaps and verdict not in ("equivalent", "inconclusive"):
        verdict = "inconclusive"
        reason = (
            f"runs of one side differ as much as the sides do: base {min(base):.6g} to "
            f"{max(base):.6g}, head {min(head):.6g} to {max(head):.6g}"
        )
    return _judgement(
        pair, metric, rule, verdict, reason, base=before, head=after, ratio=ratio,
        tolerance=tolerance if tolerance or not rule.improve else None,
        n_base=len(base), n_head=len(head),
    )  # fmt: skip


def _judge_ratio(pair: Pair, metric: Metric, rule: MetricRule, _: Policy) -> Judgement:
    shared = shared_metric(metric, pair.base, pair.head)
    if shared is None:
        why = f"no {metric.title} number that both sides have"
        return _judgement(pair, metric, rule, "unmeasured", why)
    values = [*pair.base.of(shared).values()], [*pair.head.of(shared).values()]
    judged = judge_values(pair, metric, rule, values, _policy_tolerance(rule, shared))
    if judged.verdict == "regressed" and metric is LIVE_STORAGE:
        judged = replace(judged, reason=_largest_growth(pair))
    return judged if shared is metric else replace(judged, detail=shared.title)


def _largest_growth(pair: Pair) -> str:
    """`+1.0 MiB from a.py:f line 12`, over all ranks; empty where nobody has said."""
    if pair.base.live is None or pair.head.live is None:
        return ""
    rises = risen(pair.base.live, pair.head.live)
    texts = [
        f"+{quantity.binary_bytes(more)} from {row.site or 'outside of operations'} line {row.line}"
        for row, more in rises[:_MOST_HOLDERS]
    ]
    net = sum(pair.head.live.bytes) - sum(pair.base.live.bytes)
    if (less := sum(more for _, more in rises) - net) > 0:
        texts.append(f"-{quantity.binary_bytes(less)} from others")
    return f"over all ranks {', '.join(texts)}" if texts else ""


def _judge_count(pair: Pair, metric: Metric, rule: MetricRule, policy: Policy) -> Judgement:
    """What the policy allows by name is taken off the head's number first."""
    base, head = pair.base, pair.head
    before, after = list(base.of(metric).values()), list(head.of(metric).values())
    if not before or not after or base.counts is None or head.counts is None:
        side = "base" if not before else "head"
        why = f"{side} has no counts; run it with `--set measure.counts=true`"
        return _judgement(pair, metric, rule, "unmeasured", why)
    grown = rises(base.counts, head.counts, COUNTED[metric.name][1], policy.allowed)
    waived = sum(rise.allowed for rise in grown)
    values = before, [value - waived for value in after]
    judged = judge_values(pair, metric, rule, values, 0.0)
    judged = replace(judged, head=median(after), ratio=judged.ratio if judged.base else None)
    unsteady = ", ".join(sorted({*base.counts.varying, *head.counts.varying})[:MOST_NAMED])
    if judged.verdict == "regressed" and unsteady:
        why = f"no two counted steps in a row agree about {unsteady}"
        return replace(judged, verdict="inconclusive", reason=why)
    if judged.verdict == "regressed":
        why = why_risen(metric, grown, base.counts, head.counts, policy.allowed)
        return replace(judged, reason=why)
    notes = [
        f"{size_text(metric, rise.allowed)} of {rise.name} allowed ({rise.reason})"
        for rise in grown
        if rise.allowed
    ]
    return replace(judged, reason="; ".join(filter(None, [judged.reason, *notes])))


# Kind "curve": losses and gradient norms, step by step.


class CurveFinding(NamedTuple):
    """The head run that is farthest from the base.

    bound: what the first distance from the nearest base run may reach, None where there is none.
    """

    verdict: Verdict
    reason: str
    bound: float | None = None


def _judge_curve(pair: Pair, metric: Metric, rule: MetricRule, _: Policy) -> Judgement:
    base, head = (side.curves.get(metric.name, ()) for side in (pair.base, pair.head))
    if not _has_curve(pair.base, metric) or not head:
        side = "head" if _has_curve(pair.base, metric) else "base"
        return _judgement(pair, metric, rule, "unmeasured", f"no {metric.title} of the {side}")
    distances = NORMS if metric is GRAD_NORM else LOSSES
    bounds = distances.bounds(pair.head.loss_bound)
    if rule.tolerance is not None:
        bounds = (rule.tolerance, rule.tolerance)
    finding = judge_curve(base, head, rule.mode, bounds, distances)
    before, after = (runs[0].values[-1] if runs[0].values else None for runs in (base, head))
    reason = finding.reason
    if metric is GRAD_NORM and finding.verdict == "regressed":
        losses, norms = (
            (pair.base.curve(name), pair.head.curve(name)) for name in (LOSS.name, GRAD_NORM.name)
        )
        ranks = pair.head.workload.ranks if pair.head.workload else None
        reason = "; ".join(filter(None, (reason, norm_without_loss(losses, norms, ranks))))
    ratio = 1 + relative(before, after) if before and after is not None else None
    return _judgement(
        pair, metric, rule, finding.verdict, reason, base=before, head=after, ratio=ratio,
        tolerance=finding.bound, n_base=len(base), n_head=len(head), detail=rule.mode,
    )  # fmt: skip


def judge_curve(
    base: Sequence[Curve],
    head: Sequence[Curve],
    mode: LossMode,
    accepted: tuple[float, float],
    distances: Distances = LOSSES,
) -> CurveFinding:
    """Compare all head runs with all base runs (at least one on each side).

    Bitwise: every value of every run is the same number. Otherwise two `distances` are measured,
    and each is set against the spread of repeats of the base: runs of one configuration and code.

    accepted: distances that are right even if the repeats agree better.
    """
    lengths = {curve.steps[-1] if curve.steps else None for curve in (*base, *head)}
    if len(lengths) > 1 or None in lengths:
        known = ", ".join(map(str, sorted(last or 0 for last in lengths)))
        return CurveFinding("regressed", f"the runs have different numbers of steps: {known}")
    steps, kept = (set.intersection(*(set(run.steps) for run in runs)) for runs in (base, head))
    if lacking := sorted(steps - kept):
        count = quantity.counted(len(lacking), "step")
        why = f"the head has no value at {count} of the base, first at {lacking[0]}"
        return CurveFinding("regressed", why)
    gaps = (Gap.of(base[0].by_step, run.by_step) for run in head)
    if why := next((gap.divergence for gap in gaps if gap and gap.divergence), ""):
        return CurveFinding("regressed", why, 0.0 if mode == "bitwise" else None)
    if mode == "bitwise":
        return _bitwise(base, head)
    return _against_spread(base, head, accepted, distances)


def _bitwise(base: Sequence[Curve], head: Sequence[Curve]) -> CurveFinding:
    odd = [next((c for c in runs if c.digest != base[0].digest), None) for runs in (base, head)]
    gaps = [Gap.of(base[0].by_step, curve.by_step) if curve else None for curve in odd]
    firsts = [None if gap is None else gap.first() for gap in gaps]
    texts = [f"first divergent step {_NOT_KEPT if at is None else at}" for at in firsts]
    if odd[0]:
        why = (
            f"repeats of the base are not bitwise equal ({texts[0]}), so no head can be held to it"
        )
        return CurveFinding("inconclusive", why)
    if odd[1]:
        return CurveFinding("regressed", f"not bitwise equal: {texts[1]}", 0.0)
    return CurveFinding("equivalent", "", 0.0)


_NOT_KEPT = "among those that a baseline does not keep"


def _against_spread(
    base: Sequence[Curve],
    head: Sequence[Curve],
    accepted: tuple[float, float],
    distances: Distances,
) -> CurveFinding:
    def gap(base: Curve, head: Curve) -> Gap:
        """A baseline keeps some steps, the last always."""
        apart = Gap.of(base.by_step, head.by_step)
        if apart is None:
            raise ValueError("two curves without a step in common")
        return apart

    repeats = [distances.of(gap(b, a)) for a, b in itertools.combinations(base, 2)]
    spread = [max((far[i] for far in repeats), default=0.0) for i in range(2)]
    first, second = (max(b, SPREAD_FACTOR * far) for b, far in zip(accepted, spread, strict=True))
    nearest = (min((gap(b, run) for b in base), key=distances.of) for run in head)
    worst = max(nearest, key=distances.of)
    reason = "the base has no repeats, so their spread is not known"
    if repeats:
        reason = f"repeats of the base spread by {quantity.difference(spread[0])} (n={len(base)})"
    step = distances.first_beyond(worst, (first, second))
    if step is None:
        return CurveFinding("equivalent", reason, first)
    numbers = zip(distances.of(worst), distances.words, (first, second), strict=True)
    by = " and by ".join(f"{quantity.difference(far)} {w} (bound {b:.1e})" for far, w, b in numbers)
    reason = f"first divergent step {step}: curves differ by {by}; {reason}"
    return CurveFinding("regressed", reason, first)


_JUDGES: Final[Mapping[str, Callable[[Pair, Metric, MetricRule, Policy], Judgement]]] = {
    "ratio": _judge_ratio,
    "count": _judge_count,
    "curve": _judge_curve,
}
