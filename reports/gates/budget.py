"""Where the next block helps most, until every required comparison is decided. Pure.

    blocks so far -> statuses (what is open, how many more starts it will take) -> next_cell

Which cell is measured next depends on what was measured before. That is allowed: the intervals
(`reports.statistics.sequential`) hold at every look, whoever chose it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, stdev

from bench.derive.metrics import Metric, MetricRule
from reports.gates.gate import Calibrations, case_of
from reports.gates.judgement import MetricSamples, Verdict, judge_intervals
from reports.gates.pairing import Pair
from reports.gates.policy import Policy
from reports.statistics.deciding import smallest_deciding_n
from reports.statistics.sequential import PRIOR_SPREAD, typical_starts


@dataclass(frozen=True)
class ComparisonStatus:
    """How far one required comparison of one cell is decided.

    starts: samples so far. more_starts: what it will typically take, infinite where the estimate
    lies on the tolerance itself; 0 once it is decided. head: the arm that is judged, where there
    are several.
    """

    cell: str
    metric: str
    verdict: Verdict
    starts: int
    more_starts: float
    head: str = ""

    @property
    def open(self) -> bool:
        """Whether more blocks could still decide it."""
        return self.verdict == "inconclusive"


def statuses(
    pairs: Sequence[Pair], policy: Policy, calibrations: Calibrations, cells: int
) -> list[ComparisonStatus]:
    """Every required comparison that blocks decide.

    Args:
        pairs: cells with at least one block.
        policy: what is required.
        calibrations: as for `gate`.
        cells: how many cells will be judged together, those without a block included.
    """
    found = []
    for metric, rule in policy.active():
        if metric.judge == "interval" and rule.gate == "required":
            cases = [case_of(pair, metric, rule, calibrations) for pair in pairs]
            cases = [case for case in cases if not case.why_no_ratio]
            found += statuses_of(cases, metric, rule, policy.alpha, cells)
    return found


def statuses_of(
    cases: Sequence[MetricSamples], metric: Metric, rule: MetricRule, alpha: float, cells: int
) -> list[ComparisonStatus]:
    """The comparisons of one metric; of cells without a block in common nothing is known yet."""
    looked = [replace(case, paired=True, sequential=True) for case in cases if case.blocks]
    among = max(cells, len(cases))
    judged = {one.cell: one for one in judge_intervals(looked, metric, rule, alpha, among)}
    found = []
    for case in cases:
        verdict = judged[case.cell].verdict if case.cell in judged else "inconclusive"
        more = _more_starts(case, alpha, among) if verdict == "inconclusive" else 0.0
        found.append(ComparisonStatus(case.cell, metric.name, verdict, len(case.blocks), more))
    return found


def next_cell(
    comparisons: Sequence[ComparisonStatus],
    block_seconds: Mapping[str, float],
    seconds_left: float,
    *,
    without_block: Sequence[str] = (),
    given_up: Sequence[str] = (),
) -> str | None:
    """The cell to run one more block of; None if all is decided or nothing fits any more.

    First every cell gets a block: bytes, memory and losses need no more. Then cells are taken by
    the time that they still need, shortest first, as many as fit into the time left; among these
    the one with the fewest starts, so that all see the same hours of the machine.

    Args:
        comparisons: of all cells with a block.
        block_seconds: what a block of each cell takes; a cell that is missing is assumed to take
            as long as the longest known.
        seconds_left: of the budget.
        without_block: cells that have none yet, in the order of the plan.
        given_up: cells that run no more.
    """
    usual = max(block_seconds.values(), default=0.0)
    for cell in without_block:
        if cell not in given_up and block_seconds.get(cell, usual) <= seconds_left:
            return cell
    needs: dict[str, float] = {}
    starts: dict[str, int] = {}
    for one in comparisons:
        if one.open and one.cell not in given_up:
            needs[one.cell] = max(needs.get(one.cell, 0.0), one.more_starts)
            starts[one.cell] = min(starts.get(one.cell, one.starts), one.starts)
    took = {cell: block_seconds.get(cell, usual) for cell in needs}
    needs = {cell: needs[cell] * took[cell] for cell in needs if took[cell] <= seconds_left}
    if not needs:
        return None
    ordered = sorted(needs, key=lambda cell: (needs[cell], starts[cell]))
    fitting, total = [], 0.0
    for cell in ordered:
        total += needs[cell]
        if total <= seconds_left:
            fitting.append(cell)
    return min(fitting or ordered[:1], key=lambda cell: starts[cell])


def _more_starts(case: MetricSamples, alpha: float, cells: int) -> float:
    found = [math.log(b) - math.log(a) for a, b in zip(*case.samples, strict=True)]
    least, band = smallest_deciding_n(alpha, paired=True, tests=cells), math.log1p(case.tolerance)
    if len(found) <= 1:
        return float(least - len(found))
    middle, spread = abs(fmean(found)), stdev(found)
    # Two differences may agree by chance: what is usual counts as one more of them.
    spread = math.sqrt((PRIOR_SPREAD**2 + (len(found) - 1) * spread**2) / len(found))
    distance = middle - band if middle > band else band - middle
    level = alpha / cells if middle > band else alpha
    return max(1.0, least - len(found), typical_starts(distance, spread, level) - len(found))
