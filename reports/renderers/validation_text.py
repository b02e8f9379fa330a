"""A validation as tables and sentences, for the terminal and for reports."""

from __future__ import annotations

from collections import Counter
from datetime import datetime

from bench.known_failures import PAGE, KnownFailure, of_case
from bench.verdict import CaseVerdict, CheckState, CheckVerdict, ValidationRecord
from reports.renderers import terminal
from reports.renderers.table import Row, RowKind, Table

#: Failing cases that are told in full; the rest get a line each.
MOST_DETAILS = 5
_NONE = "-"


def to_terminal(record: ValidationRecord) -> str:
    """All of it as plain text: what failed comes last, where a reader of a terminal looks."""
    parts = [headline(record)]
    if record.cases:
        parts.append(terminal.table(check_table(record)))
    reasons = reasons_table(record)
    if reasons.rows:
        parts.append(terminal.table(reasons))
    parts += failures_in_full(record)
    parts += ["\n".join(known_lines(record, engine)) for engine in record.engines]
    return "\n\n".join(part for part in parts if part)


def headline(record: ValidationRecord) -> str:
    """One sentence."""
    ending = " (interrupted)" if record.interrupted else ""
    counts = record.counts()
    work = sum(case.cpu_seconds for case in record.cases)
    return (
        f"{record.id}: {', '.join(record.engines)} ({record.wanted}) on {record.device}: "
        f"{len(record.cases)} cases: {counts['passed']} passed, {counts['failed']} failed, "
        f"{counts['not_applicable']} not applicable{_took(record)} "
        f"({work:.1f} s of processor time in the ranks){ending}"
    )


def _took(record: ValidationRecord) -> str:
    """From the first case to the last; cases run side by side."""
    if not (record.started_utc and record.ended_utc):
        return ""
    begun, ended = map(datetime.fromisoformat, (record.started_utc, record.ended_utc))
    return f", in {(ended - begun).total_seconds():.1f} s"


def check_table(record: ValidationRecord) -> Table:
    """One row per check, for every engine how often it passed and failed, and the closest call."""
    titles = ["check"]
    for engine in record.engines:
        titles += [f"{engine} passed", f"{engine} failed", f"{engine} n/a"]
    states_of_checks = [(c.engine, k.check, k.state) for c in record.cases for k in c.checks]
    counted = Counter(states_of_checks)
    states: tuple[CheckState, ...] = ("passed", "failed", "not_applicable")
    rows = []
    for check in dict.fromkeys(check for _, check, _ in states_of_checks):
        counts = [counted[engine, check, state] for engine in record.engines for state in states]
        kind: RowKind = "bad" if any(counts[1::3]) else "plain"
        rows.append(Row((check, *(str(count) if count else _NONE for count in counts)), kind))
    return Table.of(titles, rows)


def reasons_table(record: ValidationRecord) -> Table:
    """Why cases and checks do not apply: every reason once per engine, and what it stops."""
    found: dict[tuple[str, str], Counter[str]] = {}
    for case in record.cases:
        if case.state == "not_applicable":
            found.setdefault((case.engine, case.reason), Counter())["cases"] += 1
        for check in case.checks:
            if check.state == "not_applicable":
                found.setdefault((case.engine, check.reason), Counter())[check.check] += 1
    rows = (
        (engine, reason, ", ".join(f"{count} {what}" for what, count in stopped.items()))
        for (engine, reason), stopped in found.items()
    )
    return Table.of("engine | does not apply because | what", rows, left=3)


def known_lines(record: ValidationRecord, engine: str) -> list[str]:
    """What an engine fails, a line each: known or new."""
    by_cause: dict[KnownFailure | None, list[CaseVerdict]] = {}
    for case in record.cases:
        if case.engine == engine and case.failures:
            by_cause.setdefault(of_case(engine, case.case, case.failures), []).append(case)
    if not by_cause:
        return []
    return [
        f"{engine}: {verdict_of(record, engine)}; what is known: {PAGE}",
        *(f"  new    {case.case}: {case.failures[0].check}" for case in by_cause.get(None, ())),
        *(f"  known  {one.does} (in {len(cases)} cases)" for one, cases in by_cause.items() if one),
    ]


def verdict_of(record: ValidationRecord, engine: str) -> str:
    """One sentence: how many cases of an engine passed, and which of its failures are new."""
    own = record.model_copy(update={"cases": tuple(c for c in record.cases if c.engine == engine)})
    counts = own.counts()
    new = sum(
        of_case(engine, case.case, case.failures) is None for case in own.cases if case.failures
    )
    return (
        f"{counts['passed']} cases passed, {counts['failed']} failed"
        f" ({counts['failed'] - new} known, {new} new)"
    )


def failures_in_full(record: ValidationRecord) -> list[str]:
    """The first failing cases with everything that is known, then the names of the others."""
    failed = [case for case in record.cases if case.failures]
    parts = [failure_text(case) for case in failed[:MOST_DETAILS]]
    rest = failed[MOST_DETAILS:]
    if rest:
        lines = [f"  {c.case}: {', '.join(k.check for k in c.failures)}" for c in rest]
        parts.append("\n".join([f"also failed ({len(rest)}):", *lines]))
    return parts


def failure_text(case: CaseVerdict) -> str:
    """One failing case; the first failed check in full, as the others may follow from it."""
    lines = [f"FAILED {case.case}"]
    if does := case.settings.get("does"):
        lines.append(f"  does      {does}")
    first, *others = case.failures
    lines += [f"  {line}" for line in check_lines(first)]
    for check in others:
        place = f" ({check.finding.place})" if check.finding and check.finding.place else ""
        lines.append(f"  also failed: {check.check}{place}")
    return "\n".join(lines)


def check_lines(check: CheckVerdict) -> list[str]:
    """A failed check: where, what was expected, what was found, what shows why."""
    finding = check.finding
    if finding is None:
        return [check.check]
    lines = [f"{check.check}: {finding.place}" if finding.place else check.check]
    lines += [f"  expected  {finding.expected}", f"  found     {finding.found}"]
    if check.measured:
        lines.append(f"            {check.measured}")
    lines += [f"  evidence  {line}" for line in finding.evidence]
    return lines
