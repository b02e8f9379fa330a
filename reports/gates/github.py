"""GitHub Actions: annotations on stdout and the step summary. Pure text; the caller prints it."""

from __future__ import annotations

from reports.gates.gate import GateResult
from reports.gates.junit import sentence
from reports.renderers.printable import printable

MOST_ANNOTATIONS = 10
"""GitHub shows ten of a kind per step; the rest is in the summary."""

SUMMARY_BYTES = 1024 * 1024 - 1024
"""A step summary may have 1 MiB."""


def annotation_lines(result: GateResult) -> list[str]:
    """`::error ...::` and `::warning ...::` lines, the worst first."""
    source = result.sides.source
    errors = [("cell failed", f"{cell}: {why}") for cell, why in result.sides.failed]
    errors += [(f"{j.metric} {j.verdict}", sentence(j)) for j in result.of("unmeasured")]
    errors += [(f"{j.metric} regressed", sentence(j)) for j in result.of("regressed")]
    warnings = [(f"{j.metric} undecided", sentence(j)) for j in result.of("inconclusive")]
    warnings += [
        (f"{j.metric} regressed (advisory)", sentence(j))
        for j in result.of("regressed", required=False)
    ]
    warnings += [("not comparable", f"{c}: {why}") for c, why in result.sides.not_comparable]
    return [
        *(annotation("error", title, text, source) for title, text in errors[:MOST_ANNOTATIONS]),
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
