"""What CI systems read of a gate: JUnit XML, annotations of GitHub Actions and its step summary.

Pure text; the caller prints or writes it.
"""

from __future__ import annotations

from typing import Literal

from bench.derive.metrics import CURVES
from reports.compare.cause import Cause, causes
from reports.compare.judge import WORSE, Judgement, Verdicts
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
        *(_case(row, explained.get(id(row)), strict=strict) for row in result.judgements),
        *(Finding(name, "measured", why, "error", "failed") for name, why in sides.failed),
        *(
            Finding(name, "comparable", f"not comparable: {why}", "skipped")
            for name, why in sides.not_comparable
        ),
        *(Finding(name, "pruned", f"pruned: {why}", "skipped") for name, why in sides.pruned),
    ]
    return junit("mfsdp-bench gate", f"mfsdp-bench gate: {sides.head}", findings)


def _case(row: Judgement, cause: Cause | None, *, strict: bool) -> Finding:
    message = sentence(row)
    if cause is not None:
        message = f"{message}; see {cause.file}"
        return Finding(row.cell, row.metric, message, "skipped", row.verdict)
    worse = (*WORSE, *["inconclusive"] * strict)
    if row.verdict in ("equivalent", "improved"):
        return Finding(row.cell, row.metric, message)
    if row.required and row.verdict == "unmeasured":
        return Finding(row.cell, row.metric, message, "error", row.verdict)
    state: Literal["failure", "skipped"] = (
        "failure" if row.required and row.verdict in worse else "skipped"
    )
    return Finding(row.cell, row.metric, message, state, row.verdict)


def sentence(row: Judgement) -> str:
    """The judgement in a sentence; for times all three numbers by name."""
    parts = [f"{row.cell}: {row.metric} {row.verdict}" + ("" if row.required else " (advisory)")]
    if row.time_ratio is not None and row.throughput_ratio is not None:
        parts.append(
            f"time change {quantity.change(row.time_ratio - 1)}, throughput change "
            f"{quantity.change(row.throughput_ratio - 1)}, throughput ratio "
            f"{quantity.ratio(row.throughput_ratio)}, interval of the change "
            f"{interval_text(row.interval)}"
        )
    elif row.change is not None and row.metric not in CURVES:
        parts.append(f"change {quantity.change(row.change, 2, exact=True)}")
    if row.tolerance is not None and row.metric not in CURVES:
        parts.append(f"tolerance {quantity.share(row.tolerance, 1)}")
    if row.reason:
        parts.append(row.reason)
    return "; ".join(parts)


def annotation_lines(result: Verdicts) -> list[str]:
    """`::error ...::` and `::warning ...::` lines, the worst first.

    A cause is shown at its file and line; what has no place, at the sweep file.
    """
    source = result.sides.source
    errors = [("cell failed", f"{cell}: {why}", source, 0) for cell, why in result.sides.failed]
    for cause in (cause for cause in causes(result) if cause.verdict != "inconclusive"):
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
