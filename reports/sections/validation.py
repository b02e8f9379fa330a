"""Whether the engines were right: a validation for the terminal, and the newest for reports."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from datetime import datetime
from typing import TYPE_CHECKING

from bench.known_failures import PAGE, KnownFailure, of_case
from bench.store import ResultsStore
from bench.verdict import CaseVerdict, CheckState, CheckVerdict, ValidationRecord
from reports.renderers import quantity
from reports.renderers.document import (
    Block,
    Code,
    Details,
    Heading,
    Paragraph,
    TableBlock,
    note,
)
from reports.renderers.table import Row, Table

if TYPE_CHECKING:
    from reports.findings import Findings

#: Failing cases that are shown in full; the rest get a line each.
MOST_DETAILS = 5


def validation_blocks(record: ValidationRecord) -> list[Block]:
    """All of it: what failed comes last, where a reader of a terminal looks."""
    tables = (check_table(record), reasons_table(record), errors_table(record))
    known = (known_lines(record, engine) for engine in record.engines)
    return [
        Paragraph(headline(record)),
        *(TableBlock(table) for table in tables if table.rows),
        *map(Code, failures_in_full(record)),
        *(Code("\n".join(lines)) for lines in known if lines),
    ]


def validation_section(findings: Findings) -> Iterator[Block]:
    """Nothing where nothing was validated into this folder."""
    record = findings.store.validations.newest()
    if record is None:
        return
    yield note(
        "Every case runs an engine on a small model and compares gradients, weights, losses, "
        "wire and memory with plain torch in one process. Validations do not belong to a "
        "sweep: this is the newest of the results folder."
    )
    commit = str(record.environment.get("git", {}).get("commit") or "unknown")[:12]
    dated = f"{headline(record)}. Started {record.started_utc}, commit {commit}."
    yield Paragraph(dated, "warning" if record.counts()["failed"] else "plain")
    yield TableBlock(check_table(record))
    if failures := failures_in_full(record):
        yield Details("What failed", "\n\n".join(failures))
    reasons = reasons_table(record)
    if reasons.rows:
        yield Heading("What does not apply, and why")
        yield TableBlock(reasons)
    lines = [
        f"{case.state if case.state == 'passed' else 'FAILED':7} {case.case}"
        for case in record.cases
        if case.state != "not_applicable"
    ]
    yield Details(f"All {len(lines)} cases that ran", "\n".join(lines))


def verdict_lines(store: ResultsStore, engines: Iterable[str]) -> tuple[tuple[str, str], ...]:
    """Of each engine, whether it was right: its newest validation, and how much of it that was.

    Nothing where there is none.
    """
    newest = ((engine, store.validations.newest(engine)) for engine in engines)
    return tuple(
        (
            engine,
            f"{verdict_of(record, engine)} in the validation of {record.started_utc[:10]}"
            f"{_extent(record)}; what is known: {PAGE}",
        )
        for engine, record in newest
        if record is not None
    )


def _extent(record: ValidationRecord) -> str:
    parts = [record.wanted] * bool(record.wanted) + ["interrupted"] * record.interrupted
    return f" ({', '.join(parts)})" if parts else ""


def headline(record: ValidationRecord) -> str:
    """One sentence; the time from the first case to the last, of which several run at once."""
    counts, took = record.counts(), ""
    if record.started_utc and record.ended_utc:
        begun, ended = map(datetime.fromisoformat, (record.started_utc, record.ended_utc))
        took = f", in {(ended - begun).total_seconds():.1f} s"
    work = sum(case.cpu_seconds for case in record.cases)
    return (
        f"{record.id}: {', '.join(record.engines)} ({record.wanted}) on {record.device}: "
        f"{len(record.cases)} cases: {counts['passed']} passed, {counts['failed']} failed, "
        f"{counts['not_applicable']} not applicable{took} ({work:.1f} s of processor time in the "
        f"ranks){' (interrupted)' if record.interrupted else ''}"
    )


def check_table(record: ValidationRecord) -> Table:
    """One row per check, for every engine how often it passed, failed and does not apply."""
    states_of_checks = [(c.engine, k.check, k.state) for c in record.cases for k in c.checks]
    counted = Counter(states_of_checks)
    states: tuple[CheckState, ...] = ("passed", "failed", "not_applicable")
    rows = []
    for check in dict.fromkeys(check for _, check, _ in states_of_checks):
        counts = [counted[engine, check, state] for engine in record.engines for state in states]
        texts = (check, *(str(count or quantity.MISSING) for count in counts))
        rows.append(Row(texts, "bad" if any(counts[1::3]) else "plain"))
    titles = (
        f"{engine} {word}" for engine in record.engines for word in ("passed", "failed", "n/a")
    )
    return Table.of(("check", *titles), rows)


def reasons_table(record: ValidationRecord) -> Table:
    """Why cases and checks do not apply: every reason once per engine, and what it stops."""
    by_reason: dict[tuple[str, str], Counter[str]] = {}
    for case in record.cases:
        stopped = [(case.state, case.reason, "cases")]
        stopped += [(check.state, check.reason, check.check) for check in case.checks]
        for state, reason, what in stopped:
            if state == "not_applicable":
                by_reason.setdefault((case.engine, reason), Counter())[what] += 1
    rows = (
        (engine, reason, ", ".join(f"{count} {what}" for what, count in stopped.items()))
        for (engine, reason), stopped in by_reason.items()
    )
    return Table.of("engine | does not apply because | what", rows, left=3)


def errors_table(record: ValidationRecord) -> Table:
    """Of every case and parameter the worst step; nothing where errors were not requested."""
    rows = (
        (case.case, e.parameter, str(e.step), f"{e.max_abs:.2e}", f"{e.relative:.2e}")
        for case in record.cases
        for e in case.errors
    )
    return Table.of("case | gradient of | step | max abs error | relative error", rows, left=2)


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
        *(f"  known  {k.does} (in {len(cases)} cases)" for k, cases in by_cause.items() if k),
    ]


def verdict_of(record: ValidationRecord, engine: str) -> str:
    """One sentence: how many cases of an engine passed, and which of its failures are new."""
    own = [case for case in record.cases if case.engine == engine]
    passed, failed = (sum(case.state == state for case in own) for state in ("passed", "failed"))
    failures = [case for case in own if case.failures]
    new = sum(of_case(engine, case.case, case.failures) is None for case in failures)
    return f"{passed} cases passed, {failed} failed ({failed - new} known, {new} new)"


def failures_in_full(record: ValidationRecord) -> list[str]:
    """The first failing cases with everything that is known, then the names of the others."""
    failed = [case for case in record.cases if case.failures]
    parts = [failure_text(case) for case in failed[:MOST_DETAILS]]
    if rest := failed[MOST_DETAILS:]:
        lines = [f"  {c.case}: {', '.join(k.check for k in c.failures)}" for c in rest]
        parts.append("\n".join([f"also failed ({len(rest)}):", *lines]))
    return parts


def failure_text(case: CaseVerdict) -> str:
    """One failing case; the first failed check in full, as the others may follow from it."""
    lines = [f"FAILED {case.case}"]
    if does := case.settings.get("does"):
        lines.append(f"  does      {does}")
    first, *others = case.failures
    lines += [f"  {line}" for line in _check_lines(first)]
    for check in others:
        place = f" ({check.finding.place})" if check.finding and check.finding.place else ""
        lines.append(f"  also failed: {check.check}{place}")
    return "\n".join(lines)


def _check_lines(check: CheckVerdict) -> list[str]:
    """A failed check: where, what was expected, what was found, what shows why."""
    finding = check.finding
    if finding is None:
        return [check.check]
    return [
        f"{check.check}: {finding.place}" if finding.place else check.check,
        f"  expected  {finding.expected}",
        f"  found     {finding.found}",
        *([f"            {check.measured}"] if check.measured else []),
        *(f"  evidence  {line}" for line in finding.evidence),
    ]
