"""The gate: every active metric of every pair of cells, judged by one policy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from bench.derive.hardware import STATED, HardwareKey
from bench.derive.live_storage import risen
from bench.derive.metrics import (
    GRAD_NORM,
    JUDGED_IF_MEASURED,
    LIVE_STORAGE,
    LOSS,
    STEP_TIME,
    Metric,
    MetricRule,
)
from reports.comparisons.doubts import norm_without_loss
from reports.comparisons.parity import LOSSES, NORMS
from reports.comparisons.unlike import NumberChange, comparable_rates, text_of
from reports.gates.cell_samples import CellSamples, shared_metric
from reports.gates.count_gate import judge_count, unused
from reports.gates.curve_gate import judge_curve
from reports.gates.judgement import (
    Judgement,
    MetricSamples,
    judge_intervals,
    judge_values,
    unmeasured,
)
from reports.gates.noise import NoiseCalibration
from reports.gates.pairing import Pair, Sides
from reports.gates.policy import Policy
from reports.renderers import quantity

_MOST_HOLDERS = 3
Calibrations = Callable[[HardwareKey], NoiseCalibration | None]


@dataclass(frozen=True)
class GateResult:
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


def gate(
    sides: Sides, policy: Policy, calibrations: Calibrations, *, any_nodes: bool = False
) -> GateResult:
    """Judge `sides` by `policy`.

    Args:
        sides: what to compare.
        policy: tolerances and requirements.
        calibrations: the noise calibration of a kind of hardware, None if there is none.
        any_nodes: compare what different nodes of a cluster have measured.
    """
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
    return GateResult(
        sides=sides,
        policy=policy,
        judgements=tuple(_passed_over(judgements, policy)),
        calibration=calibration,
        notes=(*sides.notes, *unused(policy.allowed, sides.pairs)),
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
