"""What a report judges without being asked: arms of sweeps, and cells against their reference.

By the default policy, as `compare` and `gate` do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from bench.derive.metrics import STEP_TIME
from bench.errors import UsageError
from bench.store import ResultsStore
from reports.comparisons.change import Change
from reports.gates.cell_samples import cell_samples
from reports.gates.gate import GateResult, case_of, gate
from reports.gates.judgement import Judgement, judge_intervals
from reports.gates.noise import calibrations
from reports.gates.pairing import Pair, Sides, sides_of_arms
from reports.gates.policy import Policy
from reports.views.sweep_view import SweepView, base_arm


def judged_arms(store: ResultsStore, sweeps: Sequence[SweepView]) -> list[GateResult]:
    """Every other arm against the first; not where nothing can be compared."""
    found = []
    for sweep in sweeps:
        for head in sweep.arms:
            base = base_arm(sweep.arms)
            if head == base:
                continue
            try:
                sides = sides_of_arms(store, sweep.id, base, head)
            except UsageError:  # the plan cannot be read; the section on what is missing says so
                continue
            if sides.pairs:
                found.append(_gate(store, sides))
    return [judged for judged in found if not judged.nothing_comparable]


def _gate(store: ResultsStore, sides: Sides) -> GateResult:
    try:
        return gate(sides, Policy(), calibrations(store))
    except UsageError as error:  # a damaged calibration does not cost the report
        judged = gate(sides, Policy(), lambda _: None)
        return replace(judged, notes=(*judged.notes, f"the noise calibration: {error}"))


def judged_cells(changes: Sequence[Change], store: ResultsStore | None) -> list[Judgement]:
    """The step time of every head, with its interval; runs of two cells are never in turn."""
    policy = Policy()
    rule = policy.rules[STEP_TIME.name]
    pairs = [
        Pair(one.head.name, cell_samples(one.base), cell_samples(one.head), paired=False)
        for one in changes
    ]
    try:
        known = calibrations(store) if store else lambda _: None
        cases = [case_of(pair, STEP_TIME, rule, known) for pair in pairs]
    except UsageError:
        cases = [case_of(pair, STEP_TIME, rule, lambda _: None) for pair in pairs]
    return judge_intervals(cases, STEP_TIME, rule, policy.alpha)
