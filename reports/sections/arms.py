"""Every pair of arms, block by block, as `compare` shows it."""

from __future__ import annotations

from reports.findings import Findings
from reports.gates.gate_table import other_table, time_table
from reports.gates.gate_text import METHOD, remarks
from reports.renderers.document import Block, Bullets, Heading, Paragraph, Section, TableBlock


def arms_section(findings: Findings) -> Section | None:
    """Every other arm against the first; None where no cell has a block that counts."""
    blocks: list[Block] = []
    for judged in findings.judged:
        tables = [table(judged.judgements) for table in (time_table, other_table)]
        blocks.append(Heading(f"{judged.sides.head} against {judged.sides.base}"))
        blocks += [TableBlock(table) for table in tables if table.rows]
        blocks.append(Bullets(tuple(remarks(judged))))
    if not blocks:
        return None
    introduction = (
        "Runs of one block are compared with each other; base is the arm that is named last. "
        f"Method: {METHOD}."
    )
    return Section("arms", "Arms, block by block", (Paragraph(introduction), *blocks))
