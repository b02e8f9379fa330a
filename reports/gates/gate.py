"""The gate: every active metric of every pair of cells, judged by one policy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from bench.derive.hardware import HardwareKey
from reports.comparisons.change import MEMORY_TITLES
from reports.gates.cell_samples import MEMORY_METRICS, CellEvidence
from reports.gates.judgement import Judgement, TimeCase, judge_times, judge_values
from reports.gates.loss_gate import judge_loss
from reports.gates.noise import NoiseCalibration
from reports.gates.pairing import Pair, Sides
from reports.gates.policy import TIME_METRICS, Metric, Policy, Rule

Calibrations = Callable[[HardwareKey], NoiseCalibration | None]

RSS_TOLERANCE = 0.05
"""A resident set repeats less exactly than an allocator's peak: no smaller tolerance is used."""


@dataclass(frozen=True)
class GateResult:
    """Everything a gate found. `sides.not_comparable` grows by the cells of other hardware."""

    sides: Sides
    policy: Policy
    judgements: tuple[Judgement, ...]
    calibration: NoiseCalibration | None
    notes: tuple[str, ...] = ()

    def of(self, verdict: str, *, required: bool = True) -> list[Judgement]:
        """Judgements with this verdict."""
        return [j for j in self.judgements if j.verdict == verdict and j.required == required]

    @property
    def regressed(self) -> bool:
        """A required metric is worse beyond its tolerance."""
        return bool(self.of("regressed"))

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


def gate(sides: Sides, policy: Policy, calibrations: Calibrations) -> GateResult:
    """Judge `sides` by `policy`.

    Args:
        sides: what to compare.
        policy: tolerances and requirements.
        calibrations: the noise calibration of a kind of hardware, None if there is none.
    """
    sides = _only_comparable(sides)
    calibration = calibrations(sides.pairs[0].head.hardware) if sides.pairs else None
    judgements: list[Judgement] = []
    for metric, rule in policy.active():
        if metric in TIME_METRICS:
            judgements += _times(sides.pairs, metric, rule, policy.alpha, calibrations)
        else:
            judgements += [_single(pair, metric, rule) for pair in sides.pairs]
    order = {pair.label: index for index, pair in enumerate(sides.pairs)}
    judgements.sort(key=lambda judgement: order[judgement.cell])
    return GateResult(
        sides=sides,
        policy=policy,
        judgements=tuple(_passed_over(judgements, policy)),
        calibration=calibration,
        notes=sides.notes,
    )


def incomparable(base: CellEvidence, head: CellEvidence) -> str:
    """Why two cells may not be compared; empty if they may."""
    if base.schema_version != head.schema_version:
        return f"schema versions differ: {base.schema_version} and {head.schema_version}"
    if base.hardware != head.hardware:
        ours, theirs = base.hardware.describe(), head.hardware.describe()
        if ours == theirs:
            ours, theirs = base.hardware.slug, head.hardware.slug
        return f"hardware differs: {ours} and {theirs}"
    return ""


def _only_comparable(sides: Sides) -> Sides:
    reasons = [(pair, incomparable(pair.base, pair.head)) for pair in sides.pairs]
    refused = tuple((pair.label, why) for pair, why in reasons if why)
    return replace(
        sides,
        pairs=tuple(pair for pair, why in reasons if not why),
        not_comparable=sides.not_comparable + refused,
    )


def _times(
    pairs: Sequence[Pair],
    metric: Metric,
    rule: Rule,
    alpha: float,
    calibrations: Calibrations,
) -> list[Judgement]:
    cases, without = [], []
    for pair in pairs:
        case = _case(pair, rule, calibrations)
        usable = case.blocks if case.paired else case.base and case.head
        if usable:
            cases.append(case)
        else:
            without.append(_no_time(pair, metric, rule))
    return judge_times(cases, metric, rule, alpha) + without


def _case(pair: Pair, rule: Rule, calibrations: Calibrations) -> TimeCase:
    calibration = calibrations(pair.head.hardware)
    floor = calibration.floor(pair.head.config_hash) if calibration else 0.0
    asked = rule.tolerance or 0.0
    return TimeCase(
        cell=pair.label,
        base=pair.base.step_milliseconds,
        head=pair.head.step_milliseconds,
        paired=pair.paired,
        tolerance=max(asked, floor),
        floor=floor > asked,
        tokens_ratio=pair.head.tokens_per_step / pair.base.tokens_per_step,
    )


def _no_time(pair: Pair, metric: Metric, rule: Rule) -> Judgement:
    counts = f"{pair.base.not_steady} base and {pair.head.not_steady} head runs"
    return Judgement(
        cell=pair.label,
        metric=metric,
        verdict="unmeasured",
        required=rule.gate == "required",
        reason=f"no steady time to compare ({counts} are not steady, or not comparable in time)",
    )


def _single(pair: Pair, metric: Metric, rule: Rule) -> Judgement:
    if metric == "loss":
        return _loss(pair, rule)
    return _memory(pair, rule) if metric == "memory" else _wire(pair, rule)


def _memory(pair: Pair, rule: Rule) -> Judgement:
    metric = next(
        (m for m in MEMORY_METRICS if m in pair.base.memory and m in pair.head.memory), None
    )
    if metric is None:
        return _unmeasured(pair, "memory", rule, "no memory number that both sides have")
    tolerance = rule.tolerance or 0.0
    if metric == "rss":
        tolerance = max(tolerance, RSS_TOLERANCE)
    judged = judge_values(
        pair.label,
        "memory",
        rule,
        pair.base.memory[metric],
        pair.head.memory[metric],
        tolerance=tolerance,
    )
    return replace(judged, detail=MEMORY_TITLES[metric])


def _wire(pair: Pair, rule: Rule) -> Judgement:
    base, head = pair.base.wire_bytes, pair.head.wire_bytes
    if not base or not head:
        return _unmeasured(pair, "wire_bytes", rule, "bytes sent were not counted on both sides")
    return judge_values(pair.label, "wire_bytes", rule, base, head, tolerance=rule.tolerance or 0.0)


def _loss(pair: Pair, rule: Rule) -> Judgement:
    bound = pair.head.loss_bound if rule.tolerance is None else rule.tolerance
    found = judge_loss(pair.base.curves, pair.head.curves, rule.mode, bound)
    first, last = pair.base.curves[0].values, pair.head.curves[0].values
    return Judgement(
        cell=pair.label,
        metric="loss",
        verdict=found.verdict,
        required=rule.gate == "required",
        reason=found.reason,
        base=first[-1] if first else None,
        head=last[-1] if last else None,
        ratio=last[-1] / first[-1] if first and last and first[-1] else None,
        tolerance=found.bound,
        n_base=len(pair.base.curves),
        n_head=len(pair.head.curves),
        detail=rule.mode,
    )


def _unmeasured(pair: Pair, metric: Metric, rule: Rule, reason: str) -> Judgement:
    return Judgement(
        cell=pair.label,
        metric=metric,
        verdict="unmeasured",
        required=rule.gate == "required",
        reason=reason,
    )


def _passed_over(judgements: Sequence[Judgement], policy: Policy) -> list[Judgement]:
    """Decide what a missing number means.

    A metric that nobody asked for by name is passed over (`single` sends no bytes). Time, and what
    the policy names, must be there: where other cells have it the cell is undecided, and where no
    cell has it nothing was measured.
    """
    found = []
    for judgement in judgements:
        rule = policy.rules[judgement.metric]
        asked = rule.named or judgement.metric == "step_time"
        if judgement.verdict != "unmeasured" or not judgement.required:
            found.append(judgement)
        elif not asked:
            found.append(replace(judgement, required=False))
        elif any(j.metric == judgement.metric and j.verdict != "unmeasured" for j in judgements):
            found.append(replace(judgement, verdict="inconclusive"))
        else:
            found.append(judgement)
    return found
