"""Judgements as tables: times with their three numbers, everything else with its change."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from bench.derive.hardware import STATED
from bench.derive.metrics import STEP_TIME, judged_metrics
from reports.compare.cause import Cause, causes
from reports.compare.change import SPEED, less_one, speed_text
from reports.compare.judge import Judgement, Verdict, Verdicts
from reports.renderers import markdown, quantity, terminal
from reports.renderers.document import Block, Bullets, Details, Heading, Paragraph, TableBlock
from reports.renderers.printable import printable
from reports.renderers.table import Row, RowKind, Table

_TIMES = (
    f"cell | metric | verdict | {SPEED} | interval of the change | tolerance"
    " | p, adjusted | base ms | head ms | <runs"
)
_OTHERS = "cell | metric | verdict | change | tolerance | base | head | <runs"


def time_table(judgements: Sequence[Judgement]) -> Table:
    """Step time and throughput; the interval is of the judged metric's own change."""
    rows = [_time_row(one) for one in judgements if one.is_speed]
    return Table.of(_TIMES, rows, left=3)


def other_table(judgements: Sequence[Judgement]) -> Table:
    """Everything else, but for counts that are equal, of which there are many."""
    rows = [_other_row(one) for one in judgements if not (one.is_speed or one.is_equal_count)]
    return Table.of(_OTHERS, rows, left=3)


def verdict_text(judgement: Judgement) -> str:
    """The verdict, and whether it only advises."""
    return judgement.verdict if judgement.required else f"{judgement.verdict} (advisory)"


def interval_text(interval: tuple[float, float] | None) -> str:
    """An interval of a ratio as changes: `-0.6 % to +1.2 %`."""
    if interval is None:
        return "none"
    return f"{quantity.change(interval[0] - 1)} to {quantity.change(interval[1] - 1)}"


def _time_row(one: Judgement) -> Row:
    sides = (one.base, one.head) if one.metric == STEP_TIME.name else (None, None)
    return Row(
        (
            one.cell,
            one.metric,
            verdict_text(one),
            speed_text(less_one(one.time_ratio), one.throughput_ratio),
            interval_text(one.interval) if one.ratio is not None else quantity.MISSING,
            tolerance_text(one),
            quantity.MISSING if one.p_adjusted is None else f"{one.p_adjusted:.3g}",
            *map(quantity.milliseconds, sides),
            _runs(one),
        ),
        _kind(one),
    )


def _other_row(one: Judgement) -> Row:
    metric = judged_metrics()[one.metric]
    if metric.judge == "curve":
        change = quantity.difference(one.change, signed=True)
        tolerance = quantity.MISSING if one.tolerance is None else f"{one.tolerance:.1e}"
    elif metric.judge == "count" and one.base is not None and one.head is not None:
        more, tolerance = one.head - one.base, "none"
        in_bytes = metric.unit == "bytes" and more
        size = quantity.binary_bytes(abs(more))
        change = f"{'+' if more > 0 else '-'}{size}" if in_bytes else f"{more:+,.0f}"
    else:
        change, tolerance = quantity.change(one.change, 2), tolerance_text(one)
        if one.interval is not None:
            change = f"{change} ({interval_text(one.interval)})"
    texts = (
        one.cell,
        one.title,
        verdict_text(one),
        change,
        tolerance,
        quantity.amount(one.base, metric.unit),
        quantity.amount(one.head, metric.unit),
        _runs(one),
    )
    return Row(texts, _kind(one))


def tolerance_text(one: Judgement) -> str:
    """The tolerance, and whether the noise floor set it."""
    if one.tolerance is None:
        return quantity.MISSING
    return quantity.share(one.tolerance, 1) + (" (noise)" if one.floor else "")


def _runs(one: Judgement) -> str:
    if one.paired:
        return quantity.counted(one.n_head, "block")
    return f"{one.n_head} against {one.n_base}"


def _kind(one: Judgement) -> RowKind:
    if one.verdict in ("regressed", "missed"):
        return "bad"
    return "unsteady" if one.verdict in ("inconclusive", "unmeasured") else "plain"


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
    "regressed",
    "missed",
    "unmeasured",
    "inconclusive",
    "improved",
    "equivalent",
)


_MOST_NAMED = 3
_LONGEST_REASON = 80


def headline(result: Verdicts) -> str:
    """The outcome in one line, with the names of the cells that are the cause."""
    if result.nothing_comparable and not result.failed:
        reasons = dict.fromkeys(why for _, why in result.sides.not_comparable)
        why = quantity.few(list(reasons), _MOST_NAMED) or "no cell of the two sides"
        return f"not comparable: {why}"
    counts = Counter(one.verdict for one in result.judgements if one.required)
    found = (
        ", ".join(f"{counts[name]} {name}" for name in _WORST_FIRST if counts[name])
        or "no required metric"
    )
    if result.failed:
        word = "FAILED TO MEASURE"
    elif result.regressed:
        word = "REGRESSED" if result.of("regressed") else "NOT IMPROVED"
    else:
        word = "UNDECIDED" if result.undecided else "PASSED"
    undecided = _cells_without_a_time(result) if word == "PASSED" else ""
    return "; ".join([f"{word}{undecided}: {found}", *_named_causes(result)])


def _cells_without_a_time(result: Verdicts) -> str:
    """`, time not decided`, of all cells or of some; empty where every time is decided."""
    times = [one for one in result.judgements if one.is_speed]
    without = {one.cell for one in times if one.verdict in ("inconclusive", "unmeasured")}
    if not without:
        return ""
    cells = {one.cell for one in times}
    return ", time not decided" + (
        "" if without == cells else f" in {len(without)} of {len(cells)}"
    )


def _named_causes(result: Verdicts) -> list[str]:
    """What failed, regressed or, if there is none, is undecided; the first of many."""
    found = [
        f"{cell} failed ({printable(why, _LONGEST_REASON)})" for cell, why in result.sides.failed
    ]
    worst = result.of("unmeasured") + result.worse
    named = worst or ([] if found else result.of("inconclusive"))
    found += [cause.text for cause in causes(result, named)]
    return [quantity.few(found, _MOST_NAMED)] if found else []


def to_terminal(result: Verdicts) -> str:
    """Aligned plain text, the outcome first; rows that a place of the code explains are counted."""
    shown = [Paragraph(headline(result)), *verdict_blocks(result, below_headline=True)]
    return terminal.blocks(shown, opened=False) + "\n"


def to_markdown(result: Verdicts) -> str:
    """GitHub Markdown, the outcome first: for a pull request, a step summary, a file."""
    shown = [Heading(headline(result)), *verdict_blocks(result, below_headline=True)]
    return markdown.blocks(shown) + "\n"


def verdicts(result: Verdicts, *, form: str = "table") -> str:
    """The tables and what must be known beside them; form: `table` (plain text) or `md`."""
    write = markdown.blocks if form == "md" else terminal.blocks
    return write(verdict_blocks(result)) + "\n"


def verdict_blocks(
    result: Verdicts, *, below_headline: bool = False, explained: bool = True
) -> list[Block]:
    """Causes first, then every row that none of them explains, then what must be known beside.

    below_headline: leave out causes that it names. explained: say what the numbers mean.
    """
    placed = [cause for cause in causes(result) if cause.file]
    of_causes = {id(row) for cause in placed for row in cause.rows}
    shown, folded = (
        [one for one in result.judgements if (id(one) in of_causes) == is_folded]
        for is_folded in (False, True)
    )
    sides = f"{result.sides.head} (head) against {result.sides.base} (base)"
    blocks: list[Block] = [Paragraph(sides)]
    if placed and not (below_headline and len(placed) < _MOST_NAMED):
        blocks.append(Bullets(tuple(("regressed", one.text) for one in placed)))
    tables = (time_table(shown), other_table(shown))
    blocks += [TableBlock(table) for table in tables if table.rows]
    if folded:
        rows, of = quantity.counted(len(folded), "row"), quantity.counted(len(placed), "cause")
        inner = (TableBlock(other_table(folded)), Bullets(tuple(_reasons(folded))))
        blocks.append(Details(f"{rows} of {of}", blocks=inner))
    meaning = [("definitions", DEFINITIONS), ("method", METHOD)] if explained else []
    return [*blocks, Bullets((*meaning, *remarks(result, shown)))]


def to_data(result: Verdicts) -> dict[str, Any]:
    """Plain data; changes are fractions, not per cent."""
    calibration = result.calibration
    rates = [{"cell": cell, **asdict(rate), "ratio": rate.ratio} for cell, rate in result.rates]
    return {
        "base": result.sides.base,
        "head": result.sides.head,
        "outcome": headline(result),
        "passed": result.passed,
        "policy": result.policy.source,
        "alpha": result.policy.alpha,
        "causes": [_cause(one) for one in causes(result)],
        "judgements": [_judgement(one) for one in result.judgements],
        "failed": _pairs(result.sides.failed),
        "not_comparable": _pairs(result.sides.not_comparable),
        "pruned": _pairs(result.sides.pruned),
        "noise": None if calibration is None else calibration.describe(),
        "remarks": [{"about": title, "text": text} for title, text in remarks(result)],
    } | ({"rates": rates} if rates else {})


def remarks(result: Verdicts, rows: Sequence[Judgement] | None = None) -> list[tuple[str, str]]:
    """Everything that a reader must know beside the tables; rows: whose reasons are given."""
    found = [("failed", f"{name}: {why}") for name, why in result.sides.failed]
    found += _reasons(result.judgements if rows is None else rows)
    found += [("not comparable", f"{name}: {why}") for name, why in result.sides.not_comparable]
    found += [("rate that compares", f"{name}: {rate}") for name, rate in result.rates]
    found += [("pruned", f"{name}: {why}") for name, why in result.sides.pruned]
    found += [("left out", text) for text in result.notes]
    if result.sides.differences:
        found.append(("differs in (base, head)", "; ".join(result.sides.differences)))
    elif result.sides.set_aside:
        found.append(("set aside when matching", ", ".join(result.sides.set_aside)))
    counts = [one for one in result.judgements if one.is_count]
    if counts:
        equal = sum(one.is_equal_count for one in counts)
        found.append(("counts", f"{equal} of {len(counts)} are equal to the digit"))
    times = [one for one in result.judgements if one.is_speed]
    found += _about_times(times)
    if times:
        found.append(("noise", _noise(result)))
    if any(one.verdict == "improved" for one in times):
        found.append(("improved", "a baseline that is compared with should be promoted anew"))
    found.append(("policy", result.policy.source))
    return found


def _reasons(judgements: Sequence[Judgement]) -> list[tuple[str, str]]:
    """Why each verdict was given; cells with the same reason share a line."""
    cells: dict[tuple[str, str, str], list[str]] = {}
    for one in judgements:
        if one.reason:
            cells.setdefault((one.verdict, one.title, one.reason), []).append(one.cell)
    return [
        (verdict, f"{metric} of {', '.join(names)}: {reason}")
        for (verdict, metric, reason), names in cells.items()
    ]


def _about_times(times: Sequence[Judgement]) -> list[tuple[str, str]]:
    unpaired = [one for one in times if one.paired is False]
    if not unpaired:
        return []
    return [
        (
            "unpaired",
            f"{quantity.counted(len(unpaired), 'comparison')} of runs that were not interleaved: "
            "what the machine did meanwhile counts as change; run both sides as arms "
            "(--arm base=GITREF --arm head=. --interleave) to rule that out",
        )
    ]


def _noise(result: Verdicts) -> str:
    if result.calibration is not None:
        return result.calibration.describe()
    hardware = result.sides.pairs[0].head.hardware.describe()
    if result.sides.pairs[0].head.hardware.kind == STATED:
        return f"none of {hardware}, which is not measured here: the tolerances are as they are"
    return (
        f"this machine ({hardware}) has no noise calibration: the tolerances are taken as they "
        "are; `mfsdp-bench baseline noise SWEEP.yaml` measures a floor"
    )


def _cause(one: Cause) -> dict[str, Any]:
    return {
        "text": one.text,
        "file": one.file or None,
        "line": one.line or None,
        "milliseconds": one.milliseconds,
        "cells": one.cells,
        "metrics": list(dict.fromkeys(row.metric for row in one.rows)),
    }


def _judgement(one: Judgement) -> dict[str, Any]:
    data = asdict(one)
    data["change"] = one.change
    data["time_change"] = None if one.time_ratio is None else one.time_ratio - 1
    data["throughput_change"] = None if one.throughput_ratio is None else one.throughput_ratio - 1
    return data


def _pairs(items: Sequence[tuple[str, str]]) -> list[dict[str, str]]:
    return [{"cell": name, "reason": reason} for name, reason in items]
