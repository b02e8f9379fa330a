"""`doctor`: the findings of `bench.doctor`. Loads no torch itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from bench.cli import console, exit_codes
from bench.cli.verb import Answer, ResultsOption, columns

if TYPE_CHECKING:
    from bench.doctor.checks import DoctorFinding
    from bench.resolve.machine import Machine


class DoctorVerb(ResultsOption, name="doctor"):
    """Say what this machine can run, and what is missing.

    Examples:
        doctor
    """

    def run(self) -> Answer:
        """The findings, with what is missing and how to get it below; 3 if no run can start."""
        from bench.resolve.machine import Machine

        findings = diagnose(Machine.detect(), self.results)
        rows = [(finding.level, finding.what, finding.found) for finding in findings]
        document = [columns(("", "what", "found"), rows)]
        missing = [(item.what, item.gives or "-", item.remedy) for item in findings if item.remedy]
        if missing:
            document.append(columns(("missing", "it gives", "how to get it"), missing))
        broken = any(finding.level == "problem" for finding in findings)
        return Answer(
            document,
            {"findings": [asdict(finding) for finding in findings]},
            exit_codes.NOTHING_MEASURED if broken else exit_codes.OK,
        )


def diagnose(machine: Machine, results: Path) -> list[DoctorFinding]:
    """Everything worth knowing before a first run; a terminal shows what is being looked at."""
    from bench.doctor import checks

    looks: tuple[tuple[str, Callable[[], list[DoctorFinding]]], ...] = (
        ("this machine", lambda: checks.machine_findings(machine)),
        ("the results folder", lambda: checks.results_findings(results)),
        ("packages", checks.package_findings),
        ("torch: it is loaded", lambda: checks.torch_findings(machine)),
    )
    findings = []
    try:
        for number, (what, check) in enumerate(looks, start=1):
            console.waiting(f"{number}/{len(looks)} {what} ...")
            findings += check()
    finally:
        console.waiting("")
    return findings
