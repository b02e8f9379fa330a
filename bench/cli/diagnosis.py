"""`doctor`: the findings of `bench.doctor` as a table or as JSON. Loads no torch itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from bench.cli import console, exit_codes
from bench.cli.console import Answer
from bench.cli.verbs.check import DoctorRequest
from bench.doctor import checks
from bench.doctor.checks import DoctorFinding
from bench.resolve import Machine


def show_diagnosis(request: DoctorRequest) -> Answer:
    """The findings; 3 if no run can start here."""
    findings = diagnose(Machine.detect(), request.results)
    broken = any(finding.level == "problem" for finding in findings)
    return Answer(
        lambda: {"findings": [asdict(finding) for finding in findings]},
        lambda: _text(findings),
        exit_codes.NOTHING_MEASURED if broken else exit_codes.OK,
    )


def diagnose(machine: Machine, results: Path) -> list[DoctorFinding]:
    """Everything worth knowing before a first run; a terminal shows what is being looked at."""
    looks: tuple[tuple[str, Callable[[], list[DoctorFinding]]], ...] = (
        ("this machine", lambda: checks.machine_findings(machine)),
        ("the results folder", lambda: checks.results_findings(results)),
        ("packages", checks.package_findings),
        ("torch: it is loaded", lambda: checks.torch_findings(machine)),
    )
    found = []
    try:
        for number, (what, check) in enumerate(looks, start=1):
            console.waiting(f"{number}/{len(looks)} {what} ...")
            found += check()
    finally:
        console.waiting("")
    return found


def _text(findings: Sequence[DoctorFinding]) -> str:
    """A table, with what is missing and how to get it below."""
    rows = [(finding.level, finding.what, finding.found) for finding in findings]
    missing = [(one.what, one.gives or "-", one.remedy) for one in findings if one.remedy]
    text = console.columns(("", "what", "found"), rows)
    if missing:
        text += "\n\n" + console.columns(("missing", "it gives", "how to get it"), missing)
    return text
