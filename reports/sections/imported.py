"""Runs of other frameworks that the results folder holds, beside the measured cells."""

from __future__ import annotations

from bench.store import DamagedRecordError
from reports.comparisons.imported import CAPTION, absences, of_cell, of_import, side_by_side
from reports.findings import Findings
from reports.renderers.document import Block, Bullets, Paragraph, Section, TableBlock


def imported_section(findings: Findings) -> Section | None:
    """None where nothing was imported."""
    if not (ids := findings.store.imports.ids()):
        return None
    shown, damaged = [], []
    for one in ids:
        try:
            shown.append(of_import(findings.store.imports.read(one)))
        except DamagedRecordError as error:
            damaged.append((one, str(error)))
    table = side_by_side([*shown, *map(of_cell, findings.finished)])
    blocks: list[Block] = [TableBlock(table, CAPTION)]
    if missing := absences(shown):
        blocks += [Paragraph("The logs do not say:"), Bullets(tuple(missing))]
    if damaged:
        text = "Damaged imports, of which no number is used:"
        blocks += [Paragraph(text, tone="warning"), Bullets(tuple(damaged))]
    return Section("imported", "Imported runs", tuple(blocks))
