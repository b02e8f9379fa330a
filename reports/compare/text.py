"""Verdicts as blocks of a document, which every renderer takes, and as plain data for JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from bench.derive.hardware import STATED
from bench.derive.metrics import STEP_TIME, judged_metrics
from reports.compare.cause import causes
from reports.compare.change import SPEED, less_one, speed_text
from reports.compare.judge import WORSE, Judgement, Outcome, Verdict, Verdicts
from reports.compare.sides import Reasons
from reports.renderers import quantity
from reports.renderers.document import Block, Bullets, Details, Heading, Paragraph, TableBlock
from reports.renderers.printable import printable
from reports.renderers.table import Row, RowKind, Table

DEFINITIONS = (
    "time change: head step time / base step time - 1; throughput change: head tokens/s / base "
    "tokens/s - 1; throughput ratio: head tokens/s / base tokens/s"
)
METHOD = (
    "samples are run medians after the detected steady state; interval: changes of the metric that "
    "an exact permutation test does not reject; regressed and improved: the interval is wholly "
    "beyond the tolerance, after Benjamini-Hochberg over the cells; equivalent: it is wholly inside"
)
_WORST_FIRST: tuple[Verdict, ...] = (
    "regressed", "missed", "unmeasured", "inconclusive", "improved", "equivalent",
)  # fmt: skip
_TIMES = (
    f"cell | metric | verdict | {SPEED} | interval of the change | tolerance"
    " | p, adjusted | base ms | head ms | <runs"
)
_OTHERS = "cell | metric | verdict | change | tolerance | base | head | <runs"
_WORDS: dict[Outcome, str] = {
    "failed": "FAILED TO MEASURE",
    "regressed": "REGRESSED",
    "undecided": "UNDECIDED",
    "passed": "PASSED",
}
_KINDS: dict[str, RowKind] = {
    **dict.fromkeys(WORSE, "bad"),
    **dict.fromkeys(("inconclusive", "unmeasured"), "unsteady"),
}
_MOST_NAMED = 3
_LONGEST_REASON = 80


def headline(result: Verdicts) -> str:
    """The outcome in one line, with the names of the cells that are the cause."""
    if result.outcome == "not comparable":
        reasons = dict.fromkeys(why for _, why in result.sides.not_comparable)
        why = quantity.few(list(reasons), _MOST_NAMED) or "no cell of the two sides"
        return f"not comparable: {why}"
    counts = Counter(row.verdict for row in result.judgements if row.required)
    counted = ", ".join(f"{counts[name]} {name}" for name in _WORST_FIRST if counts[name])
    word = _WORDS[result.outcome]
    if result.outcome == "regressed" and not result.of("regressed"):
        word = "NOT IMPROVED"
    if result.outcome == "passed":
        word += _without_a_time(result)
    return "; ".join([f"{word}: {counted or 'no required metric'}", *_named_causes(result)])


def _without_a_time(result: Verdicts) -> str:
    """`, time not decided`, of all cells or of some; empty where every time is decided."""
    times = [row for row in result.judgements if row.is_speed]
    cells = {row.cell for row in times}
    without = {row.cell for row in times if row.verdict in ("inconclusive", "unmeasured")}
    some = "" if without == cells else f" in {len(without)} of {len(cells)}"
    return f", time not decided{some}" if without else ""


def _named_causes(result: Verdicts) -> list[str]:
    """What failed, regressed or, if there is none, is undecided; the first of many."""
    failed = result.sides.failed
    named = [f"{cell} failed ({printable(why, _LONGEST_REASON)})" for cell, why in failed]
    worst = [cause for cause in causes(result) if cause.verdict != "inconclusive"]
    named += [cause.text for cause in worst or ([] if named else causes(result))]
    return [quantity.few(named, _MOST_NAMED)] if named else []


def outcome_blocks(result: Verdicts) -> list[Block]:
    """The outcome first; of rows that a place of the code explains a terminal shows the number."""
    return [Heading(headline(result)), *verdict_blocks(result, below_headline=True)]


def verdict_blocks(
    result: Verdicts, *, below_headline: bool = False, explained: bool = True
) -> list[Block]:
    """Causes first, then every row that none of them explains, then what else must be known.

    below_headline: leave out causes that it names, and on a terminal the rows of all causes.
    explained: say what the numbers mean.
    """
    placed = [cause for cause in causes(result) if cause.file]
    of_causes = {id(row) for cause in placed for row in cause.rows}
    shown, folded = (
        [row for row in result.judgements if (id(row) in of_causes) == is_folded]
        for is_folded in (False, True)
    )
    sides = f"{result.sides.head} (head) against {result.sides.base} (base)"
    blocks: list[Block] = [Paragraph(sides)]
    if placed and not (below_headline and len(placed) < _MOST_NAMED):
        blocks.append(Bullets(tuple(("regressed", cause.text) for cause in placed)))
    times = Table.of(_TIMES, [_time_row(row) for row in shown if row.is_speed], left=3)
    blocks += [TableBlock(table) for table in (times, other_table(shown)) if table.rows]
    if folded:
        rows, of = quantity.counted(len(folded), "row"), quantity.counted(len(placed), "cause")
        inner = (TableBlock(other_table(folded)), Bullets(tuple(_reasons(folded))))
        blocks.append(Details(f"{rows} of {of}", blocks=inner, title_alone=below_headline))
    meaning = [("definitions", DEFINITIONS), ("method", METHOD)] if explained else []
    return [*blocks, Bullets((*meaning, *_remarks(result, shown)))]


def to_data(result: Verdicts) -> dict[str, Any]:
    """Plain data; changes are fractions, not per cent."""
    sides, calibration = result.sides, result.calibration
    rates = [{"cell": cell, **asdict(rate), "ratio": rate.ratio} for cell, rate in result.rates]
    by_cause = [
        {
            "text": cause.text,
            "file": cause.file or None,
            "line": cause.line or None,
            "milliseconds": cause.milliseconds,
            "cells": cause.cells,
            "metrics": list(dict.fromkeys(row.metric for row in cause.rows)),
        }
        for cause in causes(result)
        if cause.verdict in WORSE
    ]
    judgements = [
        asdict(row)
        | {
            "change": row.change,
            "time_change": less_one(row.time_ratio),
            "throughput_change": less_one(row.throughput_ratio),
        }
        for row in result.judgements
    ]
    remarks = _remarks(result, result.judgements)
    return {
        "base": sides.base,
        "head": sides.head,
        "outcome": headline(result),
        "passed": result.outcome == "passed",
        "policy": result.policy.source,
        "alpha": result.policy.alpha,
        "causes": by_cause,
        "judgements": judgements,
        "failed": _by_cell(sides.failed),
        "not_comparable": _by_cell(sides.not_comparable),
        "pruned": _by_cell(sides.pruned),
        "noise": None if calibration is None else calibration.describe(),
        "remarks": [{"about": title, "text": text} for title, text in remarks],
    } | ({"rates": rates} if rates else {})


def _by_cell(reasons: Reasons) -> list[dict[str, str]]:
    return [{"cell": name, "reason": reason} for name, reason in reasons]


def _remarks(result: Verdicts, rows: Sequence[Judgement]) -> list[tuple[str, str]]:
    """Everything that a reader must know besides the tables; rows: whose reasons are given."""
    sides = result.sides
    said = [("failed", f"{name}: {why}") for name, why in sides.failed]
    said += _reasons(rows)
    said += [("not comparable", f"{name}: {why}") for name, why in sides.not_comparable]
    said += [("rate that compares", f"{name}: {rate}") for name, rate in result.rates]
    said += [("pruned", f"{name}: {why}") for name, why in sides.pruned]
    said += [("left out", text) for text in result.notes]
    if sides.differences:
        said.append(("differs in (base, head)", "; ".join(sides.differences)))
    elif sides.set_aside:
        said.append(("set aside when matching", ", ".join(sides.set_aside)))
    if counts := [row for row in result.judgements if row.is_count]:
        equal = sum(row.verdict == "equivalent" for row in counts)
        said.append(("counts", f"{equal} of {len(counts)} are equal to the digit"))
    times = [row for row in result.judgements if row.is_speed]
    if unpaired := sum(row.paired is False for row in times):
        text = (
            f"{quantity.counted(unpaired, 'comparison')} of runs that were not interleaved: "
            "what the machine did meanwhile counts as change; run both sides as arms "
            "(--arm base=GITREF --arm head=. --interleave) to rule that out"
        )
        said.append(("unpaired", text))
    said += [("noise", _noise(result))] if times else []
    if any(row.verdict == "improved" for row in times):
        said.append(("improved", "a baseline that is compared with should be promoted anew"))
    return [*said, ("policy", result.policy.source)]


def _reasons(judgements: Sequence[Judgement]) -> list[tuple[str, str]]:
    """Why each verdict was given; cells with the same reason share a line."""
    cells: dict[tuple[str, str, str], list[str]] = {}
    for row in judgements:
        if row.reason:
            cells.setdefault((row.verdict, row.title, row.reason), []).append(row.cell)
    return [
        (verdict, f"{metric} of {', '.join(names)}: {reason}")
        for (verdict, metric, reason), names in cells.items()
    ]


def _noise(result: Verdicts) -> str:
    if result.calibration is not None:
        return result.calibration.describe()
    hardware = result.sides.pairs[0].head.hardware
    if hardware.kind == STATED:
        name = hardware.describe()
        return f"none of {name}, which is not measured here: the tolerances are as they are"
    return (
        f"this machine ({hardware.describe()}) has no noise calibration: the tolerances are taken "
        "as they are; `mfsdp-bench baseline noise SWEEP.yaml` measures a floor"
    )


def other_table(judgements: Sequence[Judgement]) -> Table:
    """Everything but speed, and but counts that are equal, of which there are many."""
    rows = [
        _other_row(row)
        for row in judgements
        if not (row.is_speed or (row.is_count and row.verdict == "equivalent"))
    ]
    return Table.of(_OTHERS, rows, left=3)


def interval_text(interval: tuple[float, float] | None) -> str:
    """An interval of a ratio as changes: `-0.6 % to +1.2 %`."""
    if interval is None:
        return "none"
    return f"{quantity.change(interval[0] - 1)} to {quantity.change(interval[1] - 1)}"


def _time_row(row: Judgement) -> Row:
    """The interval is of the judged metric's own change."""
    sides = (row.base, row.head) if row.metric == STEP_TIME.name else (None, None)
    return _row(
        row,
        row.metric,
        speed_text(less_one(row.time_ratio), row.throughput_ratio),
        interval_text(row.interval) if row.ratio is not None else quantity.MISSING,
        _tolerance(row),
        quantity.MISSING if row.p_adjusted is None else f"{row.p_adjusted:.3g}",
        *map(quantity.milliseconds, sides),
    )


def _other_row(row: Judgement) -> Row:
    metric = judged_metrics()[row.metric]
    if metric.judge == "curve":
        change = quantity.difference(row.change, signed=True)
        tolerance = quantity.MISSING if row.tolerance is None else f"{row.tolerance:.1e}"
    elif metric.judge == "count" and row.base is not None and row.head is not None:
        more, tolerance = row.head - row.base, "none"
        in_bytes = metric.unit == "bytes" and more
        size = quantity.binary_bytes(abs(more))
        change = f"{'+' if more > 0 else '-'}{size}" if in_bytes else f"{more:+,.0f}"
    else:
        change, tolerance = quantity.change(row.change, 2), _tolerance(row)
        if row.interval is not None:
            change = f"{change} ({interval_text(row.interval)})"
    values = (quantity.amount(value, metric.unit) for value in (row.base, row.head))
    return _row(row, row.title, change, tolerance, *values)


def _row(row: Judgement, metric: str, *numbers: str) -> Row:
    verdict = row.verdict if row.required else f"{row.verdict} (advisory)"
    runs = (
        quantity.counted(row.n_head, "block")
        if row.paired
        else f"{row.n_head} against {row.n_base}"
    )
    return Row((row.cell, metric, verdict, *numbers, runs), _KINDS.get(row.verdict, "plain"))


def _tolerance(row: Judgement) -> str:
    """The tolerance, and whether the noise floor set it."""
    if row.tolerance is None:
        return quantity.MISSING
    return quantity.share(row.tolerance, 1) + (" (noise)" if row.floor else "")
