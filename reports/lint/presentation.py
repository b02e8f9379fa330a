"""Findings for a terminal, as Markdown, as plain data, and as annotations of GitHub."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from reports.gates.ci import annotation
from reports.lint.check import Linted
from reports.lint.evidence import Evidence
from reports.lint.pairs import EvidencePair
from reports.lint.rules import RULES, LintFinding
from reports.renderers import markdown, quantity, terminal
from reports.renderers.table import Table

_MOST_LINES = 4


def to_terminal(linted: Linted) -> str:
    """Rule by rule, then the runs and how they compare."""
    parts = []
    for rule, found in _by_rule(linted).items():
        parts.append(f"{rule} ({len(found)})")
        parts += [f"  {_where(one)}\n      {one.text}{_silence(one)}" for one in found]
    parts += ["", _summary(linted)]
    for title, table in _tables(linted):
        parts += ["", title, terminal.table(table).rstrip("\n")]
    return "\n".join(parts) + "\n"


def to_markdown(linted: Linted) -> str:
    """One table of findings, and the runs and comparisons below."""
    rows = [
        (one.rule, one.run, _lines(one), one.text + _silence(one))
        for found in _by_rule(linted).values()
        for one in found
    ]
    parts = [markdown.escape(_summary(linted))]
    if rows:
        parts.append(markdown.table(Table.of("rule | run | lines | finding", rows, left=4)))
    for title, table in _tables(linted):
        parts += [f"**{title}**", markdown.table(table)]
    return "\n\n".join(parts) + "\n"


def to_github(linted: Linted) -> list[str]:
    """A line per finding that is open, for the log of a workflow."""
    return [
        annotation(
            "warning" if one.level == "warning" else "notice",
            f"{one.rule}: {one.run}",
            one.text,
            one.source,
            line=max(one.lines, default=None),
        )
        for one in linted.findings
        if one.silenced is None
    ]


def to_data(linted: Linted) -> dict[str, Any]:
    """Plain data; changes are in per cent where their names say so."""
    return {
        "findings": [asdict(one) for one in linted.findings],
        "runs": [_run(one) for one in linted.runs],
        "comparisons": [_pair(one) for one in linted.pairs],
        "open": len(linted.open),
    }


def _run(run: Evidence) -> dict[str, Any]:
    solved = run.solution
    return {
        "run": run.name,
        "label": run.label,
        "n": run.n,
        "iteration": run.iteration,
        "milliseconds": run.milliseconds,
        "teraflops_per_device": run.teraflops,
        "implied_model": solved and solved.model,
        "implied_seq_len": solved and solved.seq_len,
        "implied_devices": solved and solved.devices,
        "implied_devices_exact": solved and round(solved.exact, 4),
        "lines": list(run.lines),
    }


def _pair(pair: EvidencePair) -> dict[str, Any]:
    return {"base": pair.base.name, "head": pair.head.name, **pair.values()}


def _by_rule(linted: Linted) -> dict[str, list[LintFinding]]:
    found = {rule: [one for one in linted.findings if one.rule == rule] for rule in RULES}
    return {rule: own for rule, own in found.items() if own}


def _where(one: LintFinding) -> str:
    return one.run + (f" (lines {_lines(one)})" if one.lines else "")


def _lines(one: LintFinding) -> str:
    more = len(one.lines) - _MOST_LINES
    shown = ", ".join(map(str, one.lines[:_MOST_LINES]))
    return shown + (f" and {more} more" if more > 0 else "")


def _silence(one: LintFinding) -> str:
    if one.silenced is not None:
        return f" [silenced: {one.silenced}]"
    return " [note]" if one.level == "note" else ""


def _summary(linted: Linted) -> str:
    silenced = sum(one.silenced is not None for one in linted.findings)
    notes = sum(one.level == "note" and one.silenced is None for one in linted.findings)
    runs = quantity.counted(len(linted.runs), "run")
    return (
        f"{quantity.counted(len(linted.open), 'finding')} on {runs}"
        f" ({quantity.counted(notes, 'note')}, {silenced} silenced)"
    )


def _tables(linted: Linted) -> list[tuple[str, Table]]:
    found = []
    solved = [(run, run.solution) for run in linted.runs if run.solution is not None]
    if solved:
        rows = [
            (
                run.name,
                quantity.significant(run.milliseconds, 6),
                quantity.significant(run.teraflops),
                one.model,
                f"{one.seq_len:,}",
                f"{one.exact:.3f}",
            )
            for run, one in solved
        ]
        titles = "run | ms per step | TFLOP/s per device | implied model | sequence | devices"
        found.append(("What the FLOP formula implies", Table.of(titles, rows)))
    if linted.pairs:
        titles = "run | <against | time | throughput | ratio | max allocated | loss"
        found.append(("Changes", Table.of(titles, map(_row, linted.pairs))))
    return found


def _row(pair: EvidencePair) -> tuple[str, ...]:
    return (
        pair.head.name,
        pair.base.name,
        quantity.change(pair.time, 2),
        quantity.change(pair.throughput, 2),
        quantity.ratio(pair.ratio),
        quantity.change(pair.change(lambda run: run.peak_bytes), 2),
        quantity.change(pair.loss, 3),
    )
