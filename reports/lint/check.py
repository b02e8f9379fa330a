"""`lint_text` and `lint_runs`: from runs to findings, some of them silenced with a reason."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from bench.errors import UsageError
from bench.spec import ModelShape
from bench.workload import ImportedRun
from reports.lint.evidence import Evidence, model_in, of_cell, of_import
from reports.lint.pairs import EvidencePair
from reports.lint.rules import RULES, LintFinding, Subject
from reports.views.cells import Cell


@dataclass(frozen=True)
class Silence:
    """A rule that may be broken, in all runs or in one, and why."""

    rule: str
    run: str | None
    reason: str


@dataclass(frozen=True)
class Linted:
    """Findings, the runs that they are about, and how these compare."""

    findings: tuple[LintFinding, ...]
    runs: tuple[Evidence, ...]
    pairs: tuple[EvidencePair, ...]

    @property
    def open(self) -> tuple[LintFinding, ...]:
        """Warnings that nobody silenced."""
        return tuple(
            one for one in self.findings if one.silenced is None and one.level == "warning"
        )


def silence(text: str) -> Silence:
    """`RULE=REASON` or `RULE@RUN=REASON`.

    Raises:
        UsageError: an unknown rule, or no reason.
    """
    what, _, reason = text.partition("=")
    rule, _, run = what.strip().partition("@")
    if rule not in RULES:
        raise UsageError(f"--ignore: expected one of {', '.join(RULES)}, found {rule!r}")
    if not reason.strip():
        raise UsageError(f"--ignore {what}: expected {what}=REASON, found no reason")
    return Silence(rule, run or None, reason.strip())


def lint_text(
    runs: Sequence[ImportedRun], lines: Sequence[str], shapes: Mapping[str, ModelShape]
) -> Subject:
    """What a text with runs in it says. shapes: models that the FLOP formula is solved for."""
    starts = [run.provenance.lines[0] for run in runs if run.provenance.lines]
    stated = model_in(lines[: min(starts, default=1) - 1])
    found = tuple(of_import(run, shapes, model=stated) for run in runs)
    return Subject(found, tuple(lines), shapes)


def lint_runs(
    runs: Iterable[ImportedRun], cells: Iterable[Cell], shapes: Mapping[str, ModelShape]
) -> Subject:
    """What records say."""
    imported = tuple(of_import(run, shapes) for run in runs)
    return Subject((*imported, *map(of_cell, cells)), (), shapes)


def lint(subjects: Iterable[Subject], silences: Sequence[Silence] = ()) -> Linted:
    """All rules over all subjects, in the order of rules within a subject."""
    findings: list[LintFinding] = []
    runs: list[Evidence] = []
    pairs: list[EvidencePair] = []
    for subject in subjects:
        runs += subject.runs
        pairs += subject.pairs()
        findings += (found for rule in RULES.values() for found in rule(subject))
    return Linted(tuple(_silenced(one, silences) for one in findings), tuple(runs), tuple(pairs))


def _silenced(finding: LintFinding, silences: Sequence[Silence]) -> LintFinding:
    for one in silences:
        if one.rule == finding.rule and one.run in (None, finding.run):
            return replace(finding, silenced=one.reason)
    return finding
