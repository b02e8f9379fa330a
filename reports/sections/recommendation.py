"""What a report opens with: one recommendation with its uncertainty, or why there is none.

Arms are recommended by all that a gate requires, cells of one dtype policy by step time, and by
memory where their times are equal. A cell whose losses are not those of its policy is never
recommended.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from statistics import fmean

from bench.derive.metrics import CURVES, STEP_TIME, WIRE_BYTES
from bench.errors import UsageError
from bench.store import ResultsStore
from reports.comparisons.change import (
    Change,
    change_between,
    change_text,
    memory_metric,
    threshold,
)
from reports.comparisons.parity import ParityGroup
from reports.findings import Findings
from reports.gates.cell_samples import cell_samples
from reports.gates.gate import GateResult, case_of
from reports.gates.gate_table import interval_text
from reports.gates.judgement import Judgement, judge_intervals
from reports.gates.noise import calibrations
from reports.gates.pairing import Pair
from reports.gates.policy import DEFAULT_ALPHA, Policy
from reports.renderers import quantity
from reports.statistics.estimate import smallest_deciding_n

_NONE = "No recommendation: "


def recommendation(findings: Findings) -> str:
    """One sentence or two."""
    if findings.judged:
        return _of_arms(findings.judged)
    if not findings.measured and not findings.finished:
        return "No recommendation. Nothing was measured."
    return _of_cells(findings)


def _of_arms(judged: Sequence[GateResult]) -> str:
    better = [one for one in judged if one.passed and _improved(one)]
    if better:
        best = min(better, key=_mean_log_time)
        text = f"Recommended: {best.sides.head}. Against {best.sides.base}, {_decided(best)}."
        others = [one.sides.head for one in better if one is not best]
        if others:
            text += f" {', '.join(others)} improved too; heads are not judged against each other."
        return text
    faster = [one for one in judged if _is_faster_at_a_price(one)]
    if faster:
        best = min(faster, key=_mean_log_time)
        text = (
            f"{_NONE}a trade. Against {best.sides.base}, {best.sides.head}: "
            f"{_by_metric(best, _times(best))}; but {_by_metric(best, best.of('regressed'))}."
        )
        if best.failed:
            text += " Not everything was measured."
        also = [one.sides.head for one in faster if one is not best]
        others = [f"{one.sides.head}: {_why_not(one)}" for one in judged if one not in faster]
        text += f" Faster at a price too: {', '.join(also)}." if also else ""
        return text + (f" The others: {'; '.join(others)}." if others else "")
    if all(one.regressed for one in judged):
        worst = max(judged, key=_mean_log_time)
        return f"Recommended: {worst.sides.base}. {worst.sides.head}: {_decided(worst)}."
    return _NONE + "; ".join(f"{one.sides.head}: {_why_not(one)}" for one in judged) + "."


def _improved(result: GateResult) -> list[Judgement]:
    return result.of("improved") + result.of("improved", required=False)


def _times(result: GateResult) -> list[Judgement]:
    return [one for one in _improved(result) if one.metric == STEP_TIME.name]


def _is_faster_at_a_price(result: GateResult) -> bool:
    """With the losses of the base: what a metric that regressed is worth, nobody has said."""
    worse = {one.metric for one in result.of("regressed")} - {STEP_TIME.name}
    slower = [one for one in result.of("regressed") if one.metric == STEP_TIME.name]
    losses = [one.verdict for one in result.judgements if one.metric in CURVES]
    return bool(_times(result) and worse) and not slower and {*losses} == {"equivalent"}


def _mean_log_time(result: GateResult) -> float:
    ratios = [one.time_ratio for one in result.judgements if one.time_ratio]
    return fmean(map(math.log, ratios)) if ratios else 0.0


def _decided(result: GateResult) -> str:
    return _by_metric(result, result.of("regressed") or _improved(result))


def _by_metric(result: GateResult, wanted: Sequence[Judgement]) -> str:
    """What improved or regressed, by metric, each with the cell whose change is smallest."""
    by_metric: dict[str, list[Judgement]] = {}
    for one in wanted:
        by_metric.setdefault(one.metric, []).append(one)
    cells = len({one.cell for one in result.judgements})
    texts = []
    for metric, found in by_metric.items():
        least = min(found, key=lambda one: abs(one.change or 0.0))
        many = f"{len(found)} of {quantity.counted(cells, 'cell')}"
        texts.append(
            f"{metric} {least.verdict} in {many}, least in {least.cell} ({_of_judgement(least)})"
        )
    return "; ".join(texts)


def _of_judgement(one: Judgement) -> str:
    runs = quantity.counted(one.n_head, "block") if one.paired else f"n={one.n_head}"
    if one.time_ratio is None or one.throughput_ratio is None:
        return f"{quantity.change(one.change, 2, exact=True)}, {runs}"
    return (
        f"time {quantity.change(one.time_ratio - 1)}, throughput "
        f"{quantity.change(one.throughput_ratio - 1)}, ratio {quantity.ratio(one.throughput_ratio)}"
        f"; {quantity.share(1 - DEFAULT_ALPHA, 0)} interval of the time "
        f"{interval_text(one.interval)}, {runs}"
    )


def _why_not(result: GateResult) -> str:
    if result.failed:
        return "not everything was measured"
    if result.regressed:
        return _decided(result)
    open_cells = result.of("inconclusive")
    if open_cells:
        cells = quantity.counted(len({one.cell for one in result.judgements}), "cell")
        first = open_cells[0]
        return (
            f"{len(open_cells)} of {cells} undecided; {first.cell}, {first.metric}: {first.reason}"
        )
    return "equivalent in all that is required"


def _of_cells(findings: Findings) -> str:
    compared = [row for group in findings.parity for row in group.compared]
    agreeing = [row for row in compared if row.verdict == "parity"]
    if not agreeing:
        why = (
            "no loss is that of its reference"
            if compared
            else "no two cells are of one dtype policy"
        )
        return f"{_NONE}{why}."
    changes = _in_parity(findings, _of_one_policy(findings))
    if changes and not _is_single(changes):
        return _of_intervals(changes, _step_times(changes, findings.store))
    return _of_single_runs(findings, len(agreeing), len(compared))


def _of_single_runs(findings: Findings, agreeing: int, compared: int) -> str:
    """Losses, memory and bytes repeat from run to run: one run decides them, and no time."""
    of_all = f"{agreeing} of {quantity.counted(compared, 'cell')}"
    losses = f"the losses of {of_all} agree with the reference's"
    decided = "; ".join([losses, *filter(None, map(_least_memory, findings.parity))])
    needed = smallest_deciding_n(DEFAULT_ALPHA, paired=False, tests=compared)
    return (
        f"Decided by one run of each cell: {decided}. Not decided: step times, which "
        f"{needed} runs of each could ({_with_repeats(findings, needed)})."
    )


def _with_repeats(findings: Findings, repeats: int) -> str:
    """The command of the latest run, with so many repeats; where none is recorded, by its sweep."""
    records = [run.record for cell in findings.finished for run in cell.finished]
    latest = max(records, key=lambda record: record.status.started_utc)
    words = [str(word) for word in latest.environment.get("argv") or ()][1:]
    if words[:1] != ["run"] or "--repeat" in words:
        words = ["run", findings.sweeps[0].id]
    return shlex.join(["mfsdp-bench", *words, "--repeat", str(repeats)])


def _least_memory(group: ParityGroup) -> str:
    """Of cells with the reference's losses, the one that holds least, and what it sends."""
    alike = [row.cell for row in group.rows if row.verdict in ("reference", "parity")]
    metric = memory_metric(alike)
    if metric is None or len(alike) == 1:
        return ""
    least = min(alike, key=lambda cell: cell.value(metric) or math.inf)
    change = change_between(group.reference, least)
    if not _memory_saved(change):
        return f"{group.label}: no cell needs less memory than {group.reference.name}"
    sent = change.others.get(WIRE_BYTES.name)
    return (
        f"{group.label}: {least.name} needs least memory ({metric.title} "
        f"{quantity.change(change.memory_change)} against {group.reference.name}"
        + (f", bytes sent {quantity.change(sent)})" if sent is not None else ")")
    )


def fastest_so_far(findings: Findings) -> list[str]:
    """Of single runs, one sentence per dtype policy against its own reference; else nothing."""
    changes = _in_parity(findings, _of_one_policy(findings))
    if findings.judged or not _is_single(changes):
        return []
    by_base: dict[str, list[Change]] = {}
    for change in changes:
        by_base.setdefault(change.base.name, []).append(change)
    best = (max(members, key=lambda c: c.throughput_ratio or 0.0) for members in by_base.values())
    return [_so_far(one) for one in best]


def _so_far(best: Change) -> str:
    if (best.time_change or 0.0) < 0:
        which = f"the fastest was {best.head.name}, against {best.base.name}"
    else:
        which = f"none was faster than {best.base.name}; the nearest was {best.head.name}"
    return f"{best.base.dtypes}, not decided: {which}: {change_text(best)}."


def _of_one_policy(findings: Findings) -> list[Change]:
    """Changes of time within a dtype policy, against its own reference or the one that is named."""
    found = findings.changes if findings.reference_was_named else findings.within_policy
    return [c for c in found if c.time_change is not None and c.base.dtypes == c.head.dtypes]


def _in_parity(findings: Findings, changes: Sequence[Change]) -> list[Change]:
    rows = {row.cell.name: row.verdict for group in findings.parity for row in group.rows}
    return [change for change in changes if rows.get(change.head.name) in ("parity", "reference")]


def _is_single(changes: Sequence[Change]) -> bool:
    return any(min(change.base.n, change.head.n) == 1 for change in changes)


def _step_times(changes: Sequence[Change], store: ResultsStore) -> list[Judgement]:
    """The step time of every head, with its interval; runs of two cells are never in turn."""
    policy = Policy()
    rule = policy.rules[STEP_TIME.name]
    pairs = [
        Pair(one.head.name, cell_samples(one.base), cell_samples(one.head), paired=False)
        for one in changes
    ]
    try:
        known = calibrations(store)
        cases = [case_of(pair, STEP_TIME, rule, known) for pair in pairs]
    except UsageError:
        cases = [case_of(pair, STEP_TIME, rule, lambda _: None) for pair in pairs]
    return judge_intervals(cases, STEP_TIME, rule, policy.alpha)


def _of_intervals(changes: Sequence[Change], times: Sequence[Judgement]) -> str:
    both = list(zip(changes, times, strict=True))
    faster = [pair for pair in both if pair[1].verdict == "improved"]
    if faster:
        change, one = min(faster, key=lambda pair: pair[1].ratio or math.inf)
        return (
            f"Recommended: {change.head.name} in the place of {change.base.name} "
            f"({_of_judgement(one)}){_memory(change)}. Losses are those of the reference."
        )
    undecided = [pair for pair in both if pair[1].verdict == "inconclusive"]
    if undecided:
        change, one = min(undecided, key=lambda pair: pair[1].ratio or math.inf)
        return f"{_NONE}{change.head.name} against {change.base.name}: {one.reason}."
    equal = [pair for pair in both if pair[1].verdict == "equivalent"]
    smaller = [pair for pair in equal if _memory_saved(pair[0])]
    if smaller:
        change, one = min(smaller, key=lambda pair: pair[0].memory_change or 0.0)
        return (
            f"Recommended: {change.head.name} in the place of {change.base.name}{_memory(change)}, "
            f"in equal time ({_of_judgement(one)}). Losses are those of the reference."
        )
    if equal:
        many = quantity.counted(len(equal), "cell")
        return f"{_NONE}{many} as fast as the reference, in as much memory."
    bases = ", ".join(dict.fromkeys(change.base.name for change in changes))
    change, one = min(both, key=lambda pair: pair[1].ratio or math.inf)
    return (
        f"Recommended: {bases}. The nearest, {change.head.name}, is slower ({_of_judgement(one)})."
    )


def _memory(change: Change) -> str:
    metric, moved = change.memory_metric, change.memory_change
    if metric is None or moved is None or abs(moved) < threshold(metric):
        return ""
    return f", {metric.title} {quantity.change(moved)}"


def _memory_saved(change: Change) -> bool:
    return bool(_memory(change)) and (change.memory_change or 0.0) < 0
