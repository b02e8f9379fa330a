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
from reports.compare.cause import causes
from reports.compare.change import Change, memory_metric, threshold
from reports.compare.judge import WORSE, Judgement, Verdicts, judge_intervals
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
_Advice = tuple[str, _Reasons, str]
"""A sentence; what it rests on and how sure that is, by name; the command that shows the numbers
behind it or decides what is open, "" for none."""


def recommendation(findings: Findings) -> list[Block]:
    """Of arms by the gate, else of cells by their runs: a sentence, its reasons, its command."""
    if findings.judged:
        lead, reasons, command = _of_arms(findings)
    elif findings.finished:
        lead, reasons, command = _of_cells(findings)
    else:
        lead, reasons, command = f"{_NONE}nothing was measured.", [], ""
    blocks: list[Block] = [Paragraph(lead, "lead")]
    blocks += [Bullets(tuple(reasons))] if reasons else []
    return blocks + ([Code(command)] if command else [])


def _of_arms(findings: Findings) -> _Advice:
    judged = findings.judged
    heads = {id(verdicts): _arm(findings, verdicts.sides.head) for verdicts in judged}
    better = [
        verdicts for verdicts in judged if verdicts.outcome == "passed" and _improved(verdicts)
    ]
    faster = [verdicts for verdicts in judged if _is_faster_at_a_price(verdicts)]
    best = min(better or faster or [max(judged, key=_mean_log_time)], key=_mean_log_time)
    others = [heads[id(verdicts)] for verdicts in (better or faster) if verdicts is not best]
    head, base, command = heads[id(best)], _arm(findings, best.sides.base), _gate_command(best)
    reasons: _Reasons = []
    if better:
        lead = f"Recommended: {head} in the place of {base}."
        reasons += _decided(best)
        if others:
            text = f"{', '.join(others)} improved too; heads are not judged against each other"
            reasons.append(("other arms", text))
    elif faster:
        lead = f"{_NONE}{head} is faster than {base}, at a price."
        reasons += _by_metric(best, _times(best)) + _by_metric(best, best.of("regressed"))
        reasons += [("open", "not everything was measured")] if best.failed else []
        reasons += [("faster at a price too", other) for other in others]
        rest = [verdicts for verdicts in judged if verdicts not in faster]
        reasons += [(heads[id(verdicts)], _why_not(verdicts)) for verdicts in rest]
    elif all(verdicts.regressed for verdicts in judged):
        lead, reasons = f"Recommended: {base}, since {head} regressed.", _decided(best)
    elif len(judged) > 1:
        lead, command = f"{_NONE}no arm passed and improved.", ""
        reasons += [(heads[id(verdicts)], _why_not(verdicts)) for verdicts in judged]
    elif best.failed or best.undecided:
        lead, reasons = f"{_NONE}{head} is not decided.", [("why", _why_not(best))]
        if not best.failed:
            needed = smallest_deciding_n(DEFAULT_ALPHA, paired=True, tests=len(best.sides.pairs))
            command = _with_repeats(findings, needed) or command
    else:
        lead = f"{_NONE}{head} is equivalent in all that is required."
    return lead, reasons, command


def _arm(findings: Findings, side: str) -> str:
    """A side, `SWEEP [arm]`, by its arm alone, where the report is on one sweep."""
    arm = side.rpartition(" [")[2].removesuffix("]")
    return side if len(findings.sweeps) > 1 else f"arm {arm}"


def _gate_command(judged: Verdicts) -> str:
    """What prints its verdicts."""
    sweep, _, base = judged.sides.base.removesuffix("]").rpartition(" [")
    head = judged.sides.head.removesuffix("]").rpartition(" [")[2]
    return shlex.join(["mfsdp-bench", "gate", sweep, "--base", base, "--head", head])


def _improved(result: Verdicts) -> list[Judgement]:
    return result.of("improved") + result.of("improved", required=False)


def _times(result: Verdicts) -> list[Judgement]:
    return [row for row in _improved(result) if row.metric == STEP_TIME.name]


def _is_faster_at_a_price(result: Verdicts) -> bool:
    """With the losses of the base: what a metric that regressed is worth, nobody has said."""
    worse = {row.metric for row in result.of("regressed")}
    losses = {row.verdict for row in result.judgements if row.metric in CURVES}
    is_faster = bool(_times(result) and worse) and STEP_TIME.name not in worse
    return is_faster and losses == {"equivalent"}


def _mean_log_time(result: Verdicts) -> float:
    ratios = [row.time_ratio for row in result.judgements if row.time_ratio]
    return fmean(map(math.log, ratios)) if ratios else 0.0


def _decided(result: Verdicts) -> _Reasons:
    """What regressed, by its place where that is known; else what improved."""
    if not result.regressed:
        return _by_metric(result, _improved(result))
    by_cause = [cause for cause in causes(result) if cause.verdict in WORSE]
    placed: _Reasons = [("regressed", cause.text) for cause in by_cause if cause.file]
    rest = [row for cause in by_cause if not cause.file for row in cause.rows]
    return placed + _by_metric(result, rest)


def _by_metric(result: Verdicts, wanted: Sequence[Judgement]) -> _Reasons:
    """What improved or regressed, by metric, each with the cell whose change is smallest."""
    cells = len({row.cell for row in result.judgements})
    reasons = []
    for metric in dict.fromkeys(row.metric for row in wanted):
        members = [row for row in wanted if row.metric == metric]
        least = min(members, key=lambda row: abs(row.change or 0.0))
        many = f"{len(members)} of {quantity.counted(cells, 'cell')}"
        where = f", least in {least.cell}" if len(members) > 1 else ""
        reasons.append((metric, f"{least.verdict} in {many}{where}: {_change_text(least)}"))
    return reasons


def _change_text(row: Judgement) -> str:
    runs = quantity.counted(row.n_head, "block") if row.paired else f"n={row.n_head}"
    if row.time_ratio is None or row.throughput_ratio is None:
        return f"{quantity.change(row.change, 2, exact=True)}, {runs}"
    return (
        f"time {quantity.change(row.time_ratio - 1)}, throughput "
        f"{quantity.change(row.throughput_ratio - 1)}, ratio {quantity.ratio(row.throughput_ratio)}"
        f"; {quantity.share(1 - DEFAULT_ALPHA, 0)} interval of the time "
        f"{interval_text(row.interval)}, {runs}"
    )


def _why_not(result: Verdicts) -> str:
    undecided = result.of("inconclusive")
    if result.failed:
        return "not everything was measured"
    if result.regressed:
        return "; ".join(f"{metric} {text}" for metric, text in _decided(result))
    if not undecided:
        return "equivalent in all that is required"
    first, cells = undecided[0], len({row.cell for row in result.judgements})
    many = f"{len(undecided)} of {quantity.counted(cells, 'cell')} undecided"
    return f"{many}; {first.cell}, {first.metric}: {first.reason}"


def _of_cells(findings: Findings) -> _Advice:
    compared = [row.verdict for group in findings.parity for row in group.compared]
    if "parity" not in compared:
        others = "no loss is that of its reference" if compared else ""
        return f"{_NONE}{others or 'no two cells are of one dtype policy'}.", [], ""
    changes = _in_parity(findings)
    if changes and not _is_single(changes):
        return _of_intervals(findings, changes)
    # Losses, memory and bytes repeat from run to run: one run decides them, and no time.
    needed = smallest_deciding_n(DEFAULT_ALPHA, paired=False, tests=len(compared))
    of_all = f"{compared.count('parity')} of {quantity.counted(len(compared), 'cell')}"
    reasons = [
        ("losses", f"those of {of_all} agree with the reference's"),
        *((f"memory, {g.label}", text) for g in findings.parity if (text := _least_memory(g))),
        ("step times", f"not decided: {needed} runs of each cell could"),
    ]
    lead = "One run of each cell decides losses, memory and bytes, and no step time."
    return lead, reasons, _with_repeats(findings, needed)


def _with_repeats(findings: Findings, repeats: int) -> str:
    """The command of the latest run with so many repeats; "" where none is recorded."""
    records = [run.record for cell in findings.finished for run in cell.finished]
    latest = max(records, key=lambda record: record.status.started_utc)
    words = [str(word) for word in latest.environment.get("argv") or ()][1:]
    if words[:1] != ["run"]:
        return ""
    if "--repeat" in words[:-1]:
        at = words.index("--repeat")
        del words[at : at + 2]
    return shlex.join(["mfsdp-bench", *words, "--repeat", str(repeats)])


_AS_LITTLE = 0.005
"""A cell needs as little as the one that needs least, if it needs at most this share more."""


def _least_memory(group: ParityGroup) -> str:
    """Of cells with the reference's losses, those that hold least, and what they send.

    Without those whose optimizer gathers whole matrices, which stand in no number.
    """
    equal = [row.cell for row in group.rows if row.verdict in ("reference", "parity")]
    alike = [cell for cell in equal if not cell.resolved.gathers_matrices]
    gathering = ", ".join(cell.name for cell in equal if cell not in alike)
    left_out = f"; not with {gathering}, whose whole matrices no number has" if gathering else ""
    metric = memory_metric(alike)
    if metric is None or len(alike) == 1 or group.reference not in alike:
        return ""
    least = min(cell.value(metric) or math.inf for cell in alike)
    cells = [c for c in alike if (c.value(metric) or math.inf) <= least * (1 + _AS_LITTLE)]
    if group.reference in cells:
        return f"by {metric.title}, no cell needs less than {group.reference.name}{left_out}"
    changes = [Change(group.reference, cell) for cell in cells]
    sent = {
        None if (share := c.of(WIRE_BYTES)) is None else quantity.change(share) for c in changes
    }
    bytes_sent = f", for bytes sent {sent.pop()}" if len(sent) == 1 and None not in sent else ""
    need = "needs least" if len(cells) == 1 else "need least"
    memory = f"{metric.title} {quantity.change(changes[0].of(metric))}"
    names = " and ".join(cell.name for cell in cells)
    return f"{names} {need}: {memory} against {group.reference.name}{bytes_sent}{left_out}"


def fastest_so_far(findings: Findings) -> list[str]:
    """Of single runs, one sentence per dtype policy against its own reference; else nothing.

    Nothing either where the machine was busy with other work.
    """
    changes = _in_parity(findings)
    is_busy = busiest_start(run.record for cell in findings.cells for run in cell.runs)
    if findings.judged or is_busy or not _is_single(changes):
        return []
    sentences = []
    for base in dict.fromkeys(change.base.name for change in changes):
        of_base = [change for change in changes if change.base.name == base]
        best = max(of_base, key=lambda change: change.throughput_ratio or 0.0)
        which = f"none was faster than {base}; the nearest was {best.head.name}"
        if (best.time_change or 0.0) < 0:
            which = f"the fastest was {best.head.name}, against {base}"
        sentences.append(
            f"{best.base.dtypes}, not decided: {which}: time {quantity.change(best.time_change)}, "
            f"throughput {quantity.change(best.throughput_change)}, throughput ratio "
            f"{quantity.ratio(best.throughput_ratio)} ({best.sample_note})."
        )
    return sentences


def _in_parity(findings: Findings) -> list[Change]:
    """Changes of time within a dtype policy, of cells with the losses of its reference.

    Against the policy's own reference, or the one that is named.
    """
    changes = findings.changes if findings.reference_was_named else findings.within_policy
    verdicts = {row.cell.name: row.verdict for group in findings.parity for row in group.rows}
    return [
        change
        for change in changes
        if change.time_change is not None
        and change.base.dtypes == change.head.dtypes
        and verdicts.get(change.head.name) in ("parity", "reference")
    ]


def _is_single(changes: Sequence[Change]) -> bool:
    return any(min(change.base.n, change.head.n) == 1 for change in changes)


def _step_times(changes: Sequence[Change], store: ResultsStore) -> list[Judgement]:
    """The step time of every head, with its interval; runs of two cells are never interleaved."""
    policy = Policy()
    rule = policy.rules[STEP_TIME.name]
    pairs = [
        Pair(change.head.name, cell_samples(change.base), cell_samples(change.head), paired=False)
        for change in changes
    ]
    try:
        return judge_intervals(pairs, STEP_TIME, rule, policy.alpha, calibrations(store))
    except UsageError:  # a damaged calibration does not cost the report
        return judge_intervals(pairs, STEP_TIME, rule, policy.alpha)


def _of_intervals(findings: Findings, changes: Sequence[Change]) -> _Advice:
    judged = list(zip(changes, _step_times(changes, findings.store), strict=True))
    judged.sort(key=lambda pair: pair[1].ratio or math.inf)
    faster, undecided, equal = (
        [pair for pair in judged if pair[1].verdict == verdict]
        for verdict in ("improved", "inconclusive", "equivalent")
    )
    smaller = [pair for pair in equal if _saves_memory(pair[0])]
    if faster:
        return _in_place(*faster[0])
    if undecided:
        change, row = undecided[0]
        needed = smallest_deciding_n(DEFAULT_ALPHA, paired=False, tests=len(changes))
        command = _with_repeats(findings, max(needed, row.n_head + 1))
        lead = f"{_NONE}{change.head.name} against {change.base.name} is not decided."
        return lead, [("why", row.reason)], command
    if smaller:
        return _in_place(*min(smaller, key=lambda pair: pair[0].memory_change or 0.0))
    if equal:
        many = quantity.counted(len(equal), "cell")
        return f"{_NONE}{many} as fast as the reference, in as much memory.", [], ""
    bases = ", ".join(dict.fromkeys(change.base.name for change in changes))
    change, row = judged[0]
    lead = f"Recommended: {bases}. The nearest, {change.head.name}, is slower."
    return lead, [("step time", _change_text(row))], ""


def _in_place(change: Change, row: Judgement) -> _Advice:
    """Head recommended: by its time, or by its memory at equal time."""
    time = ("step time", f"{row.verdict}: {_change_text(row)}")
    memory = [("memory", text)] if (text := _memory_text(change)) else []
    lead = f"Recommended: {change.head.name} in the place of {change.base.name}."
    return lead, [time, *memory, ("losses", "those of the reference")], ""


def _memory_text(change: Change) -> str:
    metric, moved = change.memory_metric, change.memory_change
    if metric is None or moved is None or abs(moved) < threshold(metric):
        return ""
    return f"{metric.title} {quantity.change(moved)}"


def _saves_memory(change: Change) -> bool:
    return bool(_memory_text(change)) and (change.memory_change or 0.0) < 0
