"""What a sweep was to show: every target of its file, the verdict and the numbers behind it."""

from __future__ import annotations

from reports.findings import Findings
from reports.gates.target_verdicts import METHOD, target_table
from reports.renderers.document import Paragraph, Section, TableBlock


def targets_section(findings: Findings) -> Section | None:
    """None where no sweep has targets."""
    if not findings.targets:
        return None
    table = TableBlock(target_table(findings.targets))
    return Section("targets", "Targets", (table, Paragraph(METHOD, tone="note")))
