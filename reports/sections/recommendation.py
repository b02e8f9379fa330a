"""What a report opens with: one recommendation with its uncertainty, or why there is none.

Arms are recommended by all that a gate requires, cells of one dtype policy by step time, and by
memory where their times are equal. A cell whose losses are not those of its policy is never
recommended.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean

from bench.derive.metrics import CURVES, STEP_TIME, WIRE_BYTES
from bench.errors import UsageError
from bench.store import ResultsStore
from reports.compare.cause import causes
from reports.compare.change import (
    Change,
    change_between,
    memory_metric,
    threshold,
)
from reports.compare.judge import Judgement, Verdicts, case_of, judge_intervals
from reports.compare.noise import calibrations
from reports.compare.parity import ParityGroup
from reports.compare.policy import DEFAULT_ALPHA, Policy
from reports.compare.samples import cell_samples
from reports.compare.sides import Pair
from reports.compare.statistics import smallest_deciding_n
from reports.compare.text import interval_text
from reports.findings import Findings
from reports.renderers import quantity
from reports.renderers.document import Block, Bullets, Code, Paragraph
from reports.views.machine import busiest_start

_NONE = "No recommendation: "
_Reasons = list[tuple[str, str]]


@dataclass(frozen=True)
class Recommendation:
    """What a reader takes away.

    lead: one short sentence. reasons: what it rests on, and how sure that is, by name. command:
    shows the numbers behind it, or decides what is open; "" for none.
    """

    lead: str
    reasons: tuple[tuple[str, str], ...] = ()
    command: str = ""

    @property
    def blocks(self) -> list[Block]:
        """The sentence, its command, its reasons."""
        found: list[Block] = [Paragraph(self.lead, tone="lead")]
        found += [Bullets(self.reasons)] if self.reasons else []
        return found + ([Code(self.command)] if self.command else [])


def recommendation(findings: Findings) -> Recommendation:
    """Of arms by the gate, else of cells by their runs."""
    if findings.judged:
        return _of_arms(findings)
    if not findings.measured and not findings.finished:
        return Recommendation(_NONE + "nothing was measured.")
    return _of_cells(findings)


def _of_arms(findings: Findings) -> Recommendation:
    judged, arm = findings.judged, partial(_arm, findings)
    better = [one for one in judged if one.passed and _improved(one)]
    if better:
        best = min(better, key=_mean_log_time)
        reasons = _decided(best)
        others = [arm(one.sides.head) for one in better if one is not best]
        if others:
            text = f"{', '.join(others)} improved too; heads are not judged against each other"
            reasons.append(("other arms", text))
        lead = f"Recommended: {arm(best.sides.head)} in the place of {arm(best.sides.base)}."
        return Recommendation(lead, tuple(reasons), _gate_command(findings, best))
    faster = [one for one in judged if _is_faster_at_a_price(one)]
    if faster:
        best = min(faster, key=_mean_log_time)
        reasons = _by_metric(best, _times(best)) + _by_metric(best, best.of("regressed"))
        reasons += [("open", "not everything was measured")] if best.failed else []
        reasons += [
            ("faster at a price too", arm(one.sides.head)) for one in faster if one is not best
        ]
        reasons += [(arm(one.sides.head), _why_not(one)) for one in judged if one not in faster]
        lead = f"{_NONE}{arm(best.sides.head)} is faster than {arm(best.sides.base)}, at a price."
        return Recommendation(lead, tuple(reasons), _gate_command(findings, best))
    worst = max(judged, key=_mean_log_time)
    if all(one.regressed for one in judged):
        lead = f"Recommended: {arm(worst.sides.base)}, since {arm(worst.sides.head)} regressed."
        return Recommendation(lead, tuple(_decided(worst)), _gate_command(findings, worst))
    if len(judged) == 1:
        lead = f"{_NONE}{arm(worst.sides.head)} is not decided."
        if not (worst.failed or worst.regressed or worst.undecided):
            lead = f"{_NONE}{arm(worst.sides.head)} is equivalent in all that is required."
            return Recommendation(lead, (), _gate_command(findings, worst))
        needed = smallest_deciding_n(DEFAULT_ALPHA, paired=True, tests=len(worst.sides.pairs))
        more = _with_repeats(findings, needed) if worst.undecided and not worst.failed else ""
        command = more or _gate_command(findings, worst)
        return Recommendation(lead, (("why", _why_not(worst)),), command)
    reasons = [(arm(one.sides.head), _why_not(one)) for one in judged]
    return Recommendation(f"{_NONE}no arm passed and improved.", tuple(reasons))


def _arm(findings: Findings, side: str) -> str:
    """A side by its arm alone, where the report is on one sweep."""
    if len(findings.sweeps) > 1:
        return side
    return f"arm {side.removeprefix(f'{findings.sweeps[0].id} [').removesuffix(']')}"


def _gate_command(findings: Findings, judged: Verdicts) -> str:
    """What prints the verdicts of `judged`; "" where its sweep is not one of the report's."""
    for sweep in findings.sweeps:
        arms = [
            name.removeprefix(f"{sweep.id} [") for name in (judged.sides.base, judged.sides.head)
        ]
        base, head = (arm.removesuffix("]") for arm in arms)
        if {base, head} <= set(sweep.arms):
            return shlex.join(["mfsdp-bench", "gate", sweep.id, "--base", base, "--head", head])
    return ""


def _improved(result: Verdicts) -> list[Judgement]:
    return result.of("improved") + result.of("improved", required=False)


def _times(result: Verdicts) -> list[Judgement]:
    return [one for one in _improved(result) if one.metric == STEP_TIME.name]


def _is_faster_at_a_price(result: Verdicts) -> bool:
    """With the losses of the base: what a metric that regressed is worth, nobody has said."""
    worse = {one.metric for one in result.of("regressed")} - {STEP_TIME.name}
    slower = [one for one in result.of("regressed") if one.metric == STEP_TIME.name]
    losses = [one.verdict for one in result.judgements if one.metric in CURVES]
    return bool(_times(result) and worse) and not slower and {*losses} == {"equivalent"}


def _mean_log_time(result: Verdicts) -> float:
    ratios = [one.time_ratio for one in result.judgements if one.time_ratio]
    return fmean(map(math.log, ratios)) if ratios else 0.0


def _decided(result: Verdicts) -> _Reasons:
    """What regressed, by its place where that is known; else what improved."""
    if not result.regressed:
        return _by_metric(result, _improved(result))
    found = causes(result)
    placed: _Reasons = [("regressed", one.text) for one in found if one.file]
    return placed + _by_metric(result, [row for one in found if not one.file for row in one.rows])


def _by_metric(result: Verdicts, wanted: Sequence[Judgement]) -> _Reasons:
    """What improved or regressed, by metric, each with the cell whose change is smallest."""
    by_metric: dict[str, list[Judgement]] = {}
    for one in wanted:
        by_metric.setdefault(one.metric, []).append(one)
    cells = len({one.cell for one in result.judgements})
    reasons = []
    for metric, found in by_metric.items():
        least = min(found, key=lambda one: abs(one.change or 0.0))
        many = f"{len(found)} of {quantity.counted(cells, 'cell')}"
        where = f", least in {least.cell}" if len(found) > 1 else ""
        reasons.append((metric, f"{least.verdict} in {many}{where}: {_of_judgement(least)}"))
    return reasons


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


def _why_not(result: Verdicts) -> str:
    if result.failed:
        return "not everything was measured"
    if result.regressed:
        return "; ".join(f"{metric} {text}" for metric, text in _decided(result))
    open_cells = result.of("inconclusive")
    if open_cells:
        cells = quantity.counted(len({one.cell for one in result.judgements}), "cell")
        first = open_cells[0]
        return (
            f"{len(open_cells)} of {cells} undecided; {first.cell}, {first.metric}: {first.reason}"
        )
    return "equivalent in all that is required"


def _of_cells(findings: Findings) -> Recommendation:
    compared = [row for group in findings.parity for row in group.compared]
    agreeing = [row for row in compared if row.verdict == "parity"]
    if not agreeing:
        why = (
            "no loss is that of its reference"
            if compared
            else "no two cells are of one dtype policy"
        )
        return Recommendation(f"{_NONE}{why}.")
    changes = _in_parity(findings, _of_one_policy(findings))
    if changes and not _is_single(changes):
        return _of_intervals(findings, changes)
    return _of_single_runs(findings, len(agreeing), len(compared))


def _of_single_runs(findings: Findings, agreeing: int, compared: int) -> Recommendation:
    """Losses, memory and bytes repeat from run to run: one run decides them, and no time."""
    needed = smallest_deciding_n(DEFAULT_ALPHA, paired=False, tests=compared)
    of_all = f"{agreeing} of {quantity.counted(compared, 'cell')}"
    reasons = [
        ("losses", f"those of {of_all} agree with the reference's"),
        *((f"memory, {g.label}", text) for g in findings.parity if (text := _least_memory(g))),
        ("step times", f"not decided: {needed} runs of each cell could"),
    ]
    lead = "One run of each cell decides losses, memory and bytes, and no step time."
    return Recommendation(lead, tuple(reasons), _with_repeats(findings, needed))


def _with_repeats(findings: Findings, repeats: int) -> str:
    """The command of the latest run with so many repeats; "" where none is recorded."""
    records = [run.record for cell in findings.finished for run in cell.finished]
    latest = max(records, key=lambda record: record.status.started_utc)
    words = [str(word) for word in latest.environment.get("argv") or ()][1:]
    if words[:1] != ["run"]:
        return ""
    if "--repeat" in words[:-1]:
        at = words.index("--repeat")
        words = words[:at] + words[at + 2 :]
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
        return f"no cell needs less than {group.reference.name}"
    sent = change.others.get(WIRE_BYTES.name)
    return (
        f"{least.name} needs least: {metric.title} {quantity.change(change.memory_change)} against "
        f"{group.reference.name}"
        + (f", for bytes sent {quantity.change(sent)}" if sent is not None else "")
    )


def fastest_so_far(findings: Findings) -> list[str]:
    """Of single runs, one sentence per dtype policy against its own reference; else nothing.

    Nothing either where the machine was busy with other work.
    """
    changes = _in_parity(findings, _of_one_policy(findings))
    is_busy = busiest_start(run.record for cell in findings.cells for run in cell.runs)
    if findings.judged or is_busy or not _is_single(changes):
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
    return (
        f"{best.base.dtypes}, not decided: {which}: time {quantity.change(best.time_change)}, "
        f"throughput {quantity.change(best.throughput_change)}, throughput ratio "
        f"{quantity.ratio(best.throughput_ratio)} ({best.sample_note})."
    )


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


def _of_intervals(findings: Findings, changes: Sequence[Change]) -> Recommendation:
    both = list(zip(changes, _step_times(changes, findings.store), strict=True))
    by_verdict: dict[str, list[tuple[Change, Judgement]]] = {}
    for pair in sorted(both, key=lambda pair: pair[1].ratio or math.inf):
        by_verdict.setdefault(pair[1].verdict, []).append(pair)
    if faster := by_verdict.get("improved"):
        return _in_place(*faster[0])
    if undecided := by_verdict.get("inconclusive"):
        change, one = undecided[0]
        needed = smallest_deciding_n(DEFAULT_ALPHA, paired=False, tests=len(changes))
        lead = f"{_NONE}{change.head.name} against {change.base.name} is not decided."
        repeats = max(needed, one.n_head + 1)
        return Recommendation(lead, (("why", one.reason),), _with_repeats(findings, repeats))
    equal = by_verdict.get("equivalent", [])
    smaller = [pair for pair in equal if _memory_saved(pair[0])]
    if smaller:
        return _in_place(*min(smaller, key=lambda pair: pair[0].memory_change or 0.0))
    if equal:
        many = quantity.counted(len(equal), "cell")
        return Recommendation(f"{_NONE}{many} as fast as the reference, in as much memory.")
    bases = ", ".join(dict.fromkeys(change.base.name for change in changes))
    change, one = min(both, key=lambda pair: pair[1].ratio or math.inf)
    lead = f"Recommended: {bases}. The nearest, {change.head.name}, is slower."
    return Recommendation(lead, (("step time", _of_judgement(one)),))


def _in_place(change: Change, one: Judgement) -> Recommendation:
    """Head recommended: by its time, or by its memory at equal time."""
    memory = [("memory", text)] if (text := _memory(change)) else []
    time = ("step time", f"{one.verdict}: {_of_judgement(one)}")
    losses = ("losses", "those of the reference")
    lead = f"Recommended: {change.head.name} in the place of {change.base.name}."
    return Recommendation(lead, (time, *memory, losses))


def _memory(change: Change) -> str:
    metric, moved = change.memory_metric, change.memory_change
    if metric is None or moved is None or abs(moved) < threshold(metric):
        return ""
    return f"{metric.title} {quantity.change(moved)}"


def _memory_saved(change: Change) -> bool:
    return bool(_memory(change)) and (change.memory_change or 0.0) < 0
