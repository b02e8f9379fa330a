"""A gate's result for a terminal, as Markdown, and as plain data for JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from reports.gates.gate import GateResult
from reports.gates.gate_table import (
    is_count,
    is_equal_count,
    is_speed,
    metric_text,
    other_table,
    time_table,
)
from reports.gates.judgement import Judgement, Verdict
from reports.renderers import markdown, quantity, terminal
from reports.renderers.printable import printable

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


def headline(result: GateResult) -> str:
    """The outcome in one line, with the names of the cells that are the cause."""
    if result.nothing_comparable and not result.failed:
        reasons = dict.fromkeys(why for _, why in result.sides.not_comparable)
        return f"not comparable: {_few(list(reasons)) or 'no cell of the two sides'}"
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
    return "; ".join([f"{word}{undecided}: {found}", *_causes(result)])


def _cells_without_a_time(result: GateResult) -> str:
    """`, time not decided`, of all cells or of some; empty where every time is decided."""
    times = [one for one in result.judgements if is_speed(one)]
    without = {one.cell for one in times if one.verdict in ("inconclusive", "unmeasured")}
    if not without:
        return ""
    cells = {one.cell for one in times}
    return ", time not decided" + (
        "" if without == cells else f" in {len(without)} of {len(cells)}"
    )


def _causes(result: GateResult) -> list[str]:
    """The first cells that failed, regressed or, if there is none, are undecided."""
    found = [
        f"{cell} failed ({printable(why, _LONGEST_REASON)})" for cell, why in result.sides.failed
    ]
    worst = result.of("unmeasured") + result.worse
    for one in worst or ([] if found else result.of("inconclusive")):
        change = (
            ""
            if one.ratio is None
            else f" {quantity.change(one.change, exact=one.time_ratio is None)}"
        )
        if is_count(one) and one.base is not None and one.head is not None:
            change = f" {one.head - one.base:+,.0f}"
        found.append(f"{one.cell} {one.verdict}: {metric_text(one)}{change}")
    return [_few(found)] if found else []


def _few(texts: Sequence[str]) -> str:
    more = len(texts) - _MOST_NAMED
    return "; ".join([*texts[:_MOST_NAMED], *([f"and {more} more"] if more > 0 else [])])


def to_terminal(result: GateResult) -> str:
    """Aligned plain text, the outcome first."""
    return f"{headline(result)}\n\n{verdicts(result)}"


def to_markdown(result: GateResult) -> str:
    """GitHub Markdown, the outcome first: for a pull request, a step summary, a file."""
    return f"### {markdown.escape(headline(result))}\n\n{verdicts(result, form='md')}"


def verdicts(result: GateResult, *, form: str = "table") -> str:
    """The tables and what must be known beside them; form: `table` (plain text) or `md`."""
    tables = [t for t in (time_table(result.judgements), other_table(result.judgements)) if t.rows]
    notes = [("definitions", DEFINITIONS), ("method", METHOD), *remarks(result)]
    if form == "md":
        parts = [markdown.escape(_names(result)), *(markdown.table(table) for table in tables)]
        parts.append("\n".join(f"- {title}: {markdown.escape(text)}" for title, text in notes))
    else:
        parts = [printable(_names(result)), *(terminal.table(table) for table in tables)]
        parts.append("\n".join(printable(f"{title}: {text}") for title, text in notes))
    return "\n\n".join(parts) + "\n"


def to_data(result: GateResult) -> dict[str, Any]:
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
        "judgements": [_judgement(one) for one in result.judgements],
        "failed": _pairs(result.sides.failed),
        "not_comparable": _pairs(result.sides.not_comparable),
        "pruned": _pairs(result.sides.pruned),
        "noise": None if calibration is None else calibration.describe(),
        "remarks": [{"about": title, "text": text} for title, text in remarks(result)],
    } | ({"rates": rates} if rates else {})


def remarks(result: GateResult) -> list[tuple[str, str]]:
    """Everything that a reader must know beside the tables."""
    found = [("failed", f"{name}: {why}") for name, why in result.sides.failed]
    found += _reasons(result.judgements)
    found += [("not comparable", f"{name}: {why}") for name, why in result.sides.not_comparable]
    found += [("rate that compares", f"{name}: {rate}") for name, rate in result.rates]
    found += [("pruned", f"{name}: {why}") for name, why in result.sides.pruned]
    found += [("left out", text) for text in result.notes]
    if result.sides.differences:
        found.append(("differs in (base, head)", "; ".join(result.sides.differences)))
    elif result.sides.set_aside:
        found.append(("set aside when matching", ", ".join(result.sides.set_aside)))
    counts = [one for one in result.judgements if is_count(one)]
    if counts:
        equal = sum(map(is_equal_count, counts))
        found.append(("counts", f"{equal} of {len(counts)} are equal to the digit"))
    times = [one for one in result.judgements if is_speed(one)]
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
            cells.setdefault((one.verdict, metric_text(one), one.reason), []).append(one.cell)
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


def _noise(result: GateResult) -> str:
    if result.calibration is not None:
        return result.calibration.describe()
    hardware = result.sides.pairs[0].head.hardware.describe()
    return (
        f"this machine ({hardware}) has no noise calibration: the tolerances are taken as they "
        "are; `mfsdp-bench baseline noise SWEEP.yaml` measures a floor"
    )


def _names(result: GateResult) -> str:
    return f"{result.sides.head} (head) against {result.sides.base} (base)"


def _judgement(one: Judgement) -> dict[str, Any]:
    data = asdict(one)
    data["change"] = one.change
    data["time_change"] = None if one.time_ratio is None else one.time_ratio - 1
    data["throughput_change"] = None if one.throughput_ratio is None else one.throughput_ratio - 1
    return data


def _pairs(items: Sequence[tuple[str, str]]) -> list[dict[str, str]]:
    return [{"cell": name, "reason": reason} for name, reason in items]
