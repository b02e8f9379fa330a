"""What CI systems read of a gate: JUnit XML, annotations of GitHub Actions and its step summary.

Pure text; the caller prints or writes it.
"""

from __future__ import annotations

from typing import Literal

from bench.derive.metrics import CURVES
from reports.compare.cause import Cause, causes
from reports.compare.judge import Judgement, Verdicts
from reports.compare.text import interval_text
from reports.renderers import quantity
from reports.renderers.printable import printable
from reports.renderers.render import Finding, junit

MOST_ANNOTATIONS = 10
"""GitHub shows ten of a kind per step; the rest is in the summary."""

SUMMARY_BYTES = 1024 * 1024 - 1024
"""A step summary may have 1 MiB."""


def to_junit(result: Verdicts, *, strict: bool = False) -> str:
    """XML text.

    Failures are places of the code that made something worse, and required metrics that regressed
    for another reason (with `strict` undecided ones too); errors are cells without a number,
    skipped are pruned, incomparable, undecided and advisory ones, and what a place explains.
    """
    placed = [cause for cause in causes(result) if cause.file]
    explained = {id(row): cause for cause in placed for row in cause.rows}
    sides = result.sides
    findings = [
        *(Finding(c.file, f"line {c.line}", c.text, "failure", "regressed") for c in placed),
        *(_case(one, explained.get(id(one)), strict=strict) for one in result.judgements),
        *(Finding(name, "measured", why, "error", "failed") for name, why in sides.failed),
        *(
            Finding(name, "comparable", f"not comparable: {why}", "skipped")
            for name, why in sides.not_comparable
        ),
        *(Finding(name, "pruned", f"pruned: {why}", "skipped") for name, why in sides.pruned),
    ]
    return junit("mfsdp-bench gate", f"mfsdp-bench gate: {sides.head}", findings)


def _case(one: Judgement, cause: Cause | None, *, strict: bool) -> Finding:
    message = sentence(one)
    if cause is not None:
        message = f"{message}; see {cause.file}"
        return Finding(one.cell, one.metric, message, "skipped", one.verdict)
    worse = ("regressed", "missed", *(("inconclusive",) if strict else ()))
    if one.verdict in ("equivalent", "improved"):
        return Finding(one.cell, one.metric, message)
    if one.required and one.verdict == "unmeasured":
        return Finding(one.cell, one.metric, message, "error", one.verdict)
    state: Literal["failure", "skipped"] = (
        "failure" if one.required and one.verdict in worse else "skipped"
    )
    return Finding(one.cell, one.metric, message, state, one.verdict)


def sentence(one: Judgement) -> str:
    """The judgement in a sentence; for times all three numbers by name."""
    parts = [f"{one.cell}: {one.metric} {one.verdict}" + ("" if one.required else " (advisory)")]
    if one.time_ratio is not None and one.throughput_ratio is not None:
        parts.append(
            f"time change {quantity.change(one.time_ratio - 1)}, throughput change "
            f"{quantity.change(one.throughput_ratio - 1)}, throughput ratio "
            f"{quantity.ratio(one.throughput_ratio)}, interval of the change "
            f"{interval_text(one.interval)}"
        )
    elif one.change is not None and one.metric not in CURVES:
        parts.append(f"change {quantity.change(one.change, 2, exact=True)}")
    if one.tolerance is not None and one.metric not in CURVES:
        parts.append(f"tolerance {quantity.share(one.tolerance, 1)}")
    if one.reason:
        parts.append(one.reason)
    return "; ".join(parts)


def annotation_lines(result: Verdicts) -> list[str]:
    """`::error ...::` and `::warning ...::` lines, the worst first.

    A cause is shown at its file and line; what has no place, at the sweep file.
    """
    source = result.sides.source
    errors = [("cell failed", f"{cell}: {why}", source, 0) for cell, why in result.sides.failed]
    for cause in causes(result, result.of("unmeasured") + result.worse):
        first = cause.rows[0] if cause.rows else None
        title, text = "regressed", cause.text
        if first is not None and not cause.file:
            title = f"{first.metric} {first.verdict}"
            text = sentence(first) if len(cause.rows) == 1 else f"{text}; {sentence(first)}"
        errors.append((title, text, cause.file or source, cause.line))
    warnings = [(f"{j.metric} undecided", sentence(j)) for j in result.of("inconclusive")]
    warnings += [
        (f"{j.metric} regressed (advisory)", sentence(j))
        for j in result.of("regressed", required=False)
    ]
    warnings += [("not comparable", f"{c}: {why}") for c, why in result.sides.not_comparable]
    return [
        *(
            annotation("error", title, text, file, line=line)
            for title, text, file, line in errors[:MOST_ANNOTATIONS]
        ),
        *(
            annotation("warning", title, text, source)
            for title, text in warnings[:MOST_ANNOTATIONS]
        ),
    ]


def summary(markdown: str, already_bytes: int = 0) -> str:
    """`markdown` cut to what a step summary that holds `already_bytes` can take."""
    room = max(0, SUMMARY_BYTES - already_bytes)
    encoded = markdown.encode()
    if len(encoded) <= room:
        return markdown
    return encoded[:room].decode(errors="ignore").rpartition("\n")[0] + "\n\n(cut off)\n"


def annotation(
    level: str, title: str, text: str, source: str = "", *, line: int | None = None
) -> str:
    """One workflow command; `source` and `line` say where GitHub shows it."""
    place = f"file={_property(source)}," if source else ""
    place += f"line={line}," if source and line else ""
    return f"::{level} {place}title={_property(title)}::{_message(text)}"


def _message(text: str) -> str:
    """One line; % begins an escape."""
    return printable(text).replace("%", "%25")


def _property(text: str) -> str:
    return _message(text).replace(":", "%3A").replace(",", "%2C")
